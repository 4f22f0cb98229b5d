// Stand-in for the headers of CUDA and HIP: device code as C++ of the host, where one OS thread runs all threads of a
// block as fibers. emulator.cpp has the scheduler.
//
// The warp size is known to the emulator's own sources only, so that kernels are compiled once for both. With USE_ROCM,
// masks of lanes have 64 bits, as in HIP.
#pragma once

// Not <cmath> and <cstdlib>: these two put the overloads for float and double beside C's functions, as device code has
// them.
#include <fenv.h>
#include <math.h>
#include <stdlib.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __shared__ static  // of declarations that the translation does not know
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) alignas(bytes)

// Vector types.

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
#define EMULATOR_VECTORS(name, T)                                                \
  struct name##1 { T x; };                                                       \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                             \
  struct name##3 { T x, y, z; };                                                 \
  struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; }; \
  constexpr name##1 make_##name##1(T x) { return {x}; }                          \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }                  \
  constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }          \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTORS(char, signed char)
EMULATOR_VECTORS(uchar, unsigned char)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(ushort, unsigned short)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(uint, unsigned)
EMULATOR_VECTORS(long, long)
EMULATOR_VECTORS(ulong, unsigned long)
EMULATOR_VECTORS(longlong, long long)
EMULATOR_VECTORS(ulonglong, unsigned long long)
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(double, double)
#undef EMULATOR_VECTORS

namespace emulator {

// The place of a call in the source. `Here` as the last argument of an intrinsic names its caller.
struct Site {
  const char *intrinsic, *file;
  int line;
};
struct Here {
  const char* file;
  int line;
  Here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}
  Site of(const char* intrinsic) const { return {intrinsic, file, line}; }
};

// threadIdx, blockIdx and so on of the running fiber.
struct Current {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
  int lane;
};
extern Current current;

// Stops the launch: it throws an exception with the kernel, the block, the thread and this text.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Names the kernel that the running thread executes.
void enter_kernel(const char* name);

// The lanes of a warp that take part in a collective operation, as bits, and the values that they give.
struct Lanes {
  uint64_t group, values[64];
};

// Waits until the lanes of the mask call the same intrinsic. The result is valid until the next wait. A mask of 0
// stands for the lanes that call it from the same line, as in HIP.
const Lanes& exchange(Site site, uint64_t mask, uint64_t value = 0);

// Returns the value of a lane, which must take part.
uint64_t value_of(const Lanes& lanes, Site site, int lane);

// Returns the lanes whose values have a property, as bits.
template <typename Property>
uint64_t lanes_with(const Lanes& lanes, Property property) {
  uint64_t result = 0;
  for (int lane = 0; lane < 64; ++lane) {
    if ((lanes.group >> lane & 1) != 0 && property(lanes.values[lane])) result |= uint64_t{1} << lane;
  }
  return result;
}
inline uint64_t ballot(Site site, uint64_t mask, bool predicate) {
  return lanes_with(exchange(site, mask, predicate), [](uint64_t value) { return value != 0; });
}
template <typename T, typename Operation>
T reduce(Site site, uint64_t mask, T value, Operation operation) {
  const Lanes& lanes = exchange(site, mask, static_cast<uint64_t>(value));
  lanes_with(lanes, [&, is_first = true](uint64_t other) mutable {
    value = is_first ? static_cast<T>(other) : operation(value, static_cast<T>(other));
    return is_first = false;
  });
  return value;
}

// Waits for all threads of the block. Returns the number of those whose `predicate` holds.
int barrier(Site site, bool predicate);

// Returns the shared memory of a variable for the running block. `key` is the variable's own.
void* static_shared(const void* key, size_t bytes, size_t alignment);
void* dynamic_shared();
template <typename T, size_t kAlignment, typename Key>
T& shared(Key) {
  static const char key = 0;
  return *static_cast<T*>(static_shared(&key, sizeof(T), std::max(alignof(T), kAlignment)));
}

template <typename Call>
void call(void* context) {
  (*static_cast<Call*>(context))();
}

// Runs a kernel.
struct Launch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  void* stream = nullptr;

  template <typename Kernel, typename... Arguments>
  int operator()(Kernel kernel, Arguments... arguments) const {
    auto with_arguments = [&] { kernel(arguments...); };
    return run(call<decltype(with_arguments)>, &with_arguments);
  }
  int run(void (*call)(void*), void* context) const;
};

template <typename To, typename From>
To bits(const From& from) {
  static_assert(sizeof(From) <= sizeof(To) || sizeof(To) <= sizeof(From));
  To to{};
  memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
  return to;
}

}  // namespace emulator

static const uint3 &threadIdx = emulator::current.thread, &blockIdx = emulator::current.block;
static const dim3 &blockDim = emulator::current.block_dim, &gridDim = emulator::current.grid_dim;
extern const int warpSize;

// Synchronization.

#define EMULATOR_HERE emulator::Here here = {}
inline void __syncthreads(EMULATOR_HERE) { emulator::barrier(here.of("__syncthreads"), false); }
inline int __syncthreads_count(int predicate, EMULATOR_HERE) {
  return emulator::barrier(here.of("__syncthreads_count"), predicate);
}
inline int __syncthreads_or(int predicate, EMULATOR_HERE) {
  return emulator::barrier(here.of("__syncthreads_or"), predicate) > 0;
}
inline int __syncthreads_and(int predicate, EMULATOR_HERE) {
  return emulator::barrier(here.of("__syncthreads_and"), !predicate) == 0;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
inline void __builtin_amdgcn_s_barrier(EMULATOR_HERE) { emulator::barrier(here.of("s_barrier"), false); }
inline void __trap() { emulator::fail("__trap"); }

#if defined(USE_ROCM)
using EmulatedMask = uint64_t;
#define EMULATOR_CHECK_MASK(Mask) static_assert(sizeof(Mask) == 8, "HIP takes masks of 64 bits")
#else
using EmulatedMask = unsigned;
#define EMULATOR_CHECK_MASK(Mask) static_assert(std::is_integral_v<Mask>)
#endif
template <typename Mask>
uint64_t emulated_mask(Mask mask) {
  EMULATOR_CHECK_MASK(Mask);
  return static_cast<EmulatedMask>(mask);
}

inline void __syncwarp(EMULATOR_HERE) {
#if defined(USE_ROCM)
  constexpr uint64_t kLanes = 0;  // a fence, which does not wait for lanes that are elsewhere
#else
  constexpr uint64_t kLanes = 0xffffffffu;
#endif
  emulator::exchange(here.of("__syncwarp"), kLanes);
}
template <typename Mask, typename = std::enable_if_t<std::is_integral_v<Mask>>>
void __syncwarp(Mask mask, EMULATOR_HERE) {
  emulator::exchange(here.of("__syncwarp"), emulated_mask(mask));
}
inline EmulatedMask __activemask() {
  return static_cast<EmulatedMask>(emulator::ballot({"__activemask", "", 0}, 0, true));
}

// Shuffles, with a mask and, as in HIP, without.
namespace emulator {
enum class Shuffle { index, up, down, exclusive_or };
template <typename T>
T shuffle(Shuffle kind, Site site, uint64_t mask, T value, int by, int width) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "shuffles take at most 8 bytes");
  if (width <= 0 || width > warpSize || (width & (width - 1)) != 0) {
    fail("%s (%s:%d) has the width %d, which is not a power of two up to the warp's %d lanes", site.intrinsic,
         site.file, site.line, width, warpSize);
  }
  const int lane = current.lane, first = lane & ~(width - 1), end = first + width;
  int source = kind == Shuffle::index  ? first + (by & (width - 1))
               : kind == Shuffle::up   ? lane - by
               : kind == Shuffle::down ? lane + by
                                       : lane ^ by;
  if (source >= end || (kind == Shuffle::up && source < first)) source = lane;
  return bits<T>(value_of(exchange(site, mask, bits<uint64_t>(value)), site, source));
}
}  // namespace emulator
#define EMULATOR_SHUFFLE(name, kind, By)                                                                      \
  template <typename T>                                                                                       \
  T name(T value, By by, int width = warpSize, EMULATOR_HERE) {                                               \
    return emulator::shuffle(emulator::Shuffle::kind, here.of(#name), 0, value, static_cast<int>(by), width); \
  }                                                                                                           \
  template <typename T, typename Mask>                                                                        \
  T name##_sync(Mask mask, T value, By by, int width = warpSize, EMULATOR_HERE) {                             \
    return emulator::shuffle(emulator::Shuffle::kind, here.of(#name "_sync"), emulated_mask(mask), value,     \
                             static_cast<int>(by), width);                                                    \
  }
EMULATOR_SHUFFLE(__shfl, index, int)
EMULATOR_SHUFFLE(__shfl_up, up, unsigned)
EMULATOR_SHUFFLE(__shfl_down, down, unsigned)
EMULATOR_SHUFFLE(__shfl_xor, exclusive_or, int)

#define EMULATOR_VOTE(name, Result, negated, expression)                                              \
  inline Result name(int predicate, EMULATOR_HERE) {                                                  \
    const uint64_t ballot = emulator::ballot(here.of(#name), 0, (predicate != 0) != negated);         \
    return expression;                                                                                \
  }                                                                                                   \
  template <typename Mask>                                                                            \
  Result name##_sync(Mask mask, int predicate, EMULATOR_HERE) {                                       \
    const emulator::Site site = here.of(#name "_sync");                                               \
    const uint64_t ballot = emulator::ballot(site, emulated_mask(mask), (predicate != 0) != negated); \
    return expression;                                                                                \
  }
EMULATOR_VOTE(__ballot, EmulatedMask, false, static_cast<EmulatedMask>(ballot))
EMULATOR_VOTE(__any, int, false, ballot != 0)
EMULATOR_VOTE(__all, int, true, ballot == 0)
#undef EMULATOR_VOTE
template <typename Mask, typename T>
EmulatedMask __match_any_sync(Mask mask, T value, EMULATOR_HERE) {
  const auto own = emulator::bits<uint64_t>(value);
  return static_cast<EmulatedMask>(
      emulator::lanes_with(emulator::exchange(here.of("__match_any_sync"), emulated_mask(mask), own),
                           [&](uint64_t other) { return other == own; }));
}
#define EMULATOR_REDUCE(name, T, expression)                                                                  \
  template <typename Mask>                                                                                    \
  T name(Mask mask, T value, EMULATOR_HERE) {                                                                 \
    return emulator::reduce(here.of(#name), emulated_mask(mask), value, [](T a, T b) { return expression; }); \
  }
EMULATOR_REDUCE(__reduce_add_sync, unsigned, a + b)
EMULATOR_REDUCE(__reduce_add_sync, int, a + b)
EMULATOR_REDUCE(__reduce_min_sync, unsigned, std::min(a, b))
EMULATOR_REDUCE(__reduce_min_sync, int, std::min(a, b))
EMULATOR_REDUCE(__reduce_max_sync, unsigned, std::max(a, b))
EMULATOR_REDUCE(__reduce_max_sync, int, std::max(a, b))
EMULATOR_REDUCE(__reduce_and_sync, unsigned, a& b)
EMULATOR_REDUCE(__reduce_or_sync, unsigned, a | b)
EMULATOR_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
#undef EMULATOR_REDUCE

// Atomics: only one fiber runs at a time.
#define EMULATOR_ATOMIC(name, result)                                                 \
  template <typename T>                                                               \
  __attribute__((no_sanitize("thread"))) T name(T* at, std::common_type_t<T> value) { \
    const T old = *at;                                                                \
    *at = static_cast<T>(result);                                                     \
    return old;                                                                       \
  }
EMULATOR_ATOMIC(atomicAdd, old + value)
EMULATOR_ATOMIC(atomicSub, old - value)
EMULATOR_ATOMIC(atomicMin, value < old ? value : old)
EMULATOR_ATOMIC(atomicMax, old < value ? value : old)
EMULATOR_ATOMIC(atomicAnd, old& value)
EMULATOR_ATOMIC(atomicOr, old | value)
EMULATOR_ATOMIC(atomicXor, old ^ value)
EMULATOR_ATOMIC(atomicExch, value)
EMULATOR_ATOMIC(atomicInc, old >= value ? T{0} : old + 1)
EMULATOR_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef EMULATOR_ATOMIC
template <typename T>
__attribute__((no_sanitize("thread"))) T atomicCAS(T* at, std::common_type_t<T> expected, std::common_type_t<T> value) {
  const T old = *at;
  if (old == expected) *at = value;
  return old;
}

// Loads and stores with cache hints.
#define EMULATOR_LOAD(name) \
  template <typename T>     \
  T name(const T* from) {   \
    return *from;           \
  }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldca)
EMULATOR_LOAD(__ldcg)
EMULATOR_LOAD(__ldcs)
EMULATOR_LOAD(__ldcv)
EMULATOR_LOAD(__ldlu)
#undef EMULATOR_LOAD
#define EMULATOR_STORE(name)                             \
  template <typename T>                                  \
  void name(T* to, const std::common_type_t<T>& value) { \
    *to = value;                                         \
  }
EMULATOR_STORE(__stwb)
EMULATOR_STORE(__stcg)
EMULATOR_STORE(__stcs)
EMULATOR_STORE(__stwt)
#undef EMULATOR_STORE
inline size_t __cvta_generic_to_shared(const void* shared) {
  return static_cast<size_t>(static_cast<const char*>(shared) - static_cast<const char*>(nullptr));
}

#include "emulator_math.h"
#include "emulator_runtime.h"
#include "emulator_types.h"

// Of asm. The C library and that of C++ write __asm__.
#define asm            \
  static_assert(false, \
                "no inline assembly: write a plain body for the emulator, or use the one for ROCm (--backend rocm)");
