// SiLU on the CPU, forward and backward.
//
// Reads:    x, for the backward pass also grad; each element once.
// Writes:   `out`.
// Must not: start threads, allocate, or keep state between calls.
//
// The compiler vectorizes the loops because of `omp simd` (-fopenmp-simd needs no OpenMP runtime) and
// -fno-trapping-math, which lets it evaluate both sides of a conditional. They are compiled once per instruction set,
// and selected at run time.
#include <algorithm>
#include <type_traits>

#include "${python_name}_cpu/${operator}.h"
#include "kit/cpu.h"

namespace op {
namespace {

template <class T, bool kBackward>
INLINE void run_range(const Problem& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const auto* x = static_cast<const Storage*>(problem.x);
  const auto* grad = static_cast<const Storage*>(problem.grad);
  auto* __restrict__ out = static_cast<Storage*>(problem.out);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    if constexpr (kBackward) {
      out[i] = T::encode(T::decode(grad[i]) * derivative(T::decode(x[i])));
    } else {
      out[i] = T::encode(value(T::decode(x[i])));
    }
  }
}

#if defined(__x86_64__)
// 16-bit elements are converted outside of the loop, in blocks that stay in the cache. Compilers do not emit the CPU's
// conversions of float16 for a loop, and the portable ones take longer than all else; bfloat16's forward pass takes a
// tenth less.
constexpr int64_t kBlock = 512;

template <class T>
INLINE void to_floats(const uint16_t* from, float* __restrict__ to, int64_t count) {
  if constexpr (std::is_same_v<T, kit::Float16>) return kit::float16_to_floats(from, to, count);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = T::decode(from[i]);
}

template <class T>
INLINE void from_floats(const float* from, uint16_t* __restrict__ to, int64_t count) {
  if constexpr (std::is_same_v<T, kit::Float16>) return kit::floats_to_float16(from, to, count);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = T::encode(from[i]);
}

template <class T, bool kBackward>
INLINE void run_blocks(const Problem& problem, int64_t begin, int64_t end) {
  if constexpr (std::is_same_v<T, kit::Float32>) {
    run_range<T, kBackward>(problem, begin, end);
  } else {
    float x[kBlock], grad[kBlock], out[kBlock];
    for (; begin < end; begin += kBlock) {
      const int64_t count = std::min(kBlock, end - begin);
      to_floats<T>(static_cast<const uint16_t*>(problem.x) + begin, x, count);
      if constexpr (kBackward) to_floats<T>(static_cast<const uint16_t*>(problem.grad) + begin, grad, count);
      run_range<kit::Float32, kBackward>({kit::Type::float32, count, x, grad, out}, 0, count);
      from_floats<T>(out, static_cast<uint16_t*>(problem.out) + begin, count);
    }
  }
}

template <class T, bool kBackward>
__attribute__((target("avx2,fma"))) void run_avx2(const Problem& problem, int64_t begin, int64_t end) {
  run_blocks<T, kBackward>(problem, begin, end);
}
template <class T, bool kBackward>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void run_avx512(
    const Problem& problem, int64_t begin, int64_t end) {
  run_blocks<T, kBackward>(problem, begin, end);
}
#endif

template <class T, bool kBackward>
void run_here(const Problem& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (kit::has_avx512()) return run_avx512<T, kBackward>(problem, begin, end);
  if (kit::has_avx2()) return run_avx2<T, kBackward>(problem, begin, end);
#endif
  run_range<T, kBackward>(problem, begin, end);
}

template <class T>
void run_pass(const Problem& problem, int64_t begin, int64_t end) {
  return problem.grad ? run_here<T, true>(problem, begin, end) : run_here<T, false>(problem, begin, end);
}

}  // namespace

void run(const Problem& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case kit::Type::float32:
      return run_pass<kit::Float32>(problem, begin, end);
    case kit::Type::float16:
      return run_pass<kit::Float16>(problem, begin, end);
    case kit::Type::bfloat16:
      return run_pass<kit::BFloat16>(problem, begin, end);
  }
}

}  // namespace op
