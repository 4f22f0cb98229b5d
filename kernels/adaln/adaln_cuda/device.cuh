// What the kernels share: how elements move and are converted, where rows lie, and sums over the threads of a row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "adaln/problem.h"
#include "kit/async_copy.cuh"
#include "kit/elements.cuh"
#include "kit/launch.cuh"

namespace adaln {

using namespace kit;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Vectors of a row are read and written once: what is written is the first to leave the L2 cache. Loads are ordinary
// ones, which a barrier holds in their place; others the compiler puts behind copies that take no registers.
__device__ __forceinline__ uint4 load_word_once(const uint4* from) {
  uint4 word;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from)
               : "memory");
  return word;
}

// Volatile, so that all of them are on their way before the first is used: to save registers, the compiler would put
// each beside its use.
__device__ __forceinline__ uint4 load_word_now(const uint4* from) {
  uint4 word;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from));
  return word;
}
// Shared memory by its own addresses.
__device__ __forceinline__ uint4 load_shared(uint32_t from, uint4) {
  uint4 word;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "r"(from)
               : "memory");
  return word;
}
__device__ __forceinline__ uint2 load_shared(uint32_t from, uint2) {
  uint2 word;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word.x), "=r"(word.y) : "r"(from) : "memory");
  return word;
}

__device__ __forceinline__ void store_shared(uint32_t to, uint4 word) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, uint2 word) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(word.x), "r"(word.y) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

// 16 bytes of 32, from one of the first 16 on.
__device__ __forceinline__ uint4 word_from(uint4 low, uint4 high, unsigned shift) {
  uint32_t parts[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) parts[i] = (shift & 8) != 0 ? parts[i + 2] : parts[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) parts[i] = (shift & 4) != 0 ? parts[i + 1] : parts[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) parts[i] = __funnelshift_r(parts[i], parts[i + 1], shift % 4 * 8);
  return make_uint4(parts[0], parts[1], parts[2], parts[3]);
}

// How many elements before the start of a row the vector begins that holds it.
template <int kWidth, typename T>
__device__ __forceinline__ int before(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kWidth);
}

// Elements as float32, and back. In pairs, which takes half the instructions.
template <int kWidth>
__device__ __forceinline__ void decode_all(const float* elements, float (&values)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = elements[i];
}
template <int kWidth>
__device__ __forceinline__ void decode_all(const __half* elements, float (&values)[kWidth]) {
  if constexpr (kWidth == 1) {
    values[0] = decode(elements[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const float2 pair = __half22float2(__halves2half2(elements[i], elements[i + 1]));
      values[i] = pair.x;
      values[i + 1] = pair.y;
    }
  }
}
template <int kWidth>
__device__ __forceinline__ void decode_all(const __nv_bfloat16* elements, float (&values)[kWidth]) {
  if constexpr (kWidth == 1) {
    values[0] = decode(elements[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      uint32_t pair;
      memcpy(&pair, elements + i, sizeof(pair));
      values[i] = __uint_as_float(pair << 16);
      values[i + 1] = __uint_as_float(pair & 0xffff0000u);
    }
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> encode_all(const float (&values)[kWidth]) {
  Vector<T, kWidth> vector;
  if constexpr (kWidth == 1 || std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector.elements[i] = encode<T>(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(values[i], values[i + 1]);
        memcpy(&vector.elements[i], &pair, sizeof(pair));
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
        memcpy(&vector.elements[i], &pair, sizeof(pair));
      }
    }
  }
  return vector;
}

// The elements of a vector in shared memory.
template <typename T, int kWidth>
__device__ __forceinline__ void decode_shared(uint32_t from, float (&values)[kWidth]) {
  const auto word = load_shared(from, typename Word<sizeof(T) * kWidth>::Type{});
  Vector<T, kWidth> vector;
  memcpy(&vector, &word, sizeof(word));
  decode_all(vector.elements, values);
}

constexpr int kAnyWidth = 8;  // of vectors whose type is known when the kernel runs: a word, or two of float32

struct Kind {
  bool wide;  // whether it is float32
  bool half;  // else, whether it is float16

  __host__ __device__ int words() const { return wide ? 2 : 1; }
  __host__ __device__ int bytes() const { return 2 * words(); }  // of an element
};

inline Kind kind_of(Type type) { return {type == Type::float32, type == Type::float16}; }

__device__ __forceinline__ void decode_words(const uint4 (&words)[2], Kind kind, float (&values)[kAnyWidth]) {
  if (kind.wide) {
    memcpy(values, words, sizeof(words));
  } else if (kind.half) {
    __half elements[kAnyWidth];
    memcpy(elements, words, sizeof(elements));
    decode_all(elements, values);
  } else {
    __nv_bfloat16 elements[kAnyWidth];
    memcpy(elements, words, sizeof(elements));
    decode_all(elements, values);
  }
}

__device__ __forceinline__ void encode_words(const float (&values)[kAnyWidth], Kind kind, uint4 (&words)[2]) {
  if (kind.wide) {
    memcpy(words, values, sizeof(words));
  } else if (kind.half) {
    const auto vector = encode_all<__half>(values);
    memcpy(words, &vector, sizeof(vector));
  } else {
    const auto vector = encode_all<__nv_bfloat16>(values);
    memcpy(words, &vector, sizeof(vector));
  }
}

// From shared memory, the second word so many bytes behind the first.
__device__ __forceinline__ void read_words(uint32_t from, uint32_t distance, Kind kind, float (&values)[kAnyWidth]) {
  uint4 words[2]{load_shared(from, uint4{}), {}};
  if (kind.wide) words[1] = load_shared(from + distance, uint4{});
  decode_words(words, kind, values);
}

// From and to global memory, from the element `index` on.
__device__ __forceinline__ void load_words(const void* data, int64_t index, Kind kind, float (&values)[kAnyWidth]) {
  const auto* const from = reinterpret_cast<const uint4*>(static_cast<const char*>(data) + index * kind.bytes());
  uint4 words[2]{load_word_now(from), {}};
  if (kind.wide) words[1] = load_word_now(from + 1);
  decode_words(words, kind, values);
}
__device__ __forceinline__ void store_words(void* data, int64_t index, Kind kind, const float (&values)[kAnyWidth]) {
  auto* const to = reinterpret_cast<uint4*>(static_cast<char*>(data) + index * kind.bytes());
  uint4 words[2];
  encode_words(values, kind, words);
  store_word_streaming(to, words[0]);
  if (kind.wide) store_word_streaming(to + 1, words[1]);
}

// To T and back.
template <typename T, int kWidth>
__device__ __forceinline__ void round_all(float (&values)[kWidth]) {
  decode_all(encode_all<T, kWidth>(values).elements, values);
}

// sum += product * factor, in one step or in two.
template <typename T, int kWidth>
__device__ __forceinline__ void add_gated(float (&product)[kWidth], const float (&factor)[kWidth], bool stepwise,
                                          float (&sum)[kWidth]) {
  if (stepwise && !std::is_same_v<T, float>) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) product[j] *= factor[j];
    round_all<T>(product);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] += product[j];
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] = fmaf(product[j], factor[j], sum[j]);
  }
}

// Division by a number that is known before the launch. Of numbers below 2^31, as both are.
class Divider {
 public:
  explicit Divider(uint32_t divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    if ((uint64_t{1} << shift_) == divisor) return;
    const uint32_t power = 31 + shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << power) + divisor - 1) / divisor);
    shift_ = power - 32;
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t number) const {
    return (multiplier_ == 0 ? number : __umulhi(number, multiplier_)) >> shift_;
  }

 private:
  uint32_t multiplier_ = 0, shift_ = 0;
};

// Division of a sum by how many were summed: the reciprocal in two parts, so that the quotient is as good as divided.
// Both are positive, so that an infinite sum stays one.
class Average {
 public:
  explicit Average(int64_t count) {
    const double reciprocal = 1.0 / static_cast<double>(count);
    high_ = static_cast<float>(reciprocal);
    if (static_cast<double>(high_) > reciprocal) high_ = std::nextafter(high_, 0.0f);
    low_ = std::max(static_cast<float>(reciprocal - static_cast<double>(high_)), std::numeric_limits<float>::min());
  }
  __device__ __forceinline__ float operator()(float sum) const { return sum * high_ + sum * low_; }

 private:
  float high_, low_;
};

// Rows at equal distances within a span, and these at equal distances, too.
struct Lines {
  const void* data = nullptr;
  int64_t span_stride = 0, row_stride = 0;

  template <typename T>
  __device__ __forceinline__ const T* at(uint32_t span, uint32_t row = 0) const {
    return static_cast<const T*>(data) + (span * span_stride + row * row_stride);
  }
};

// False when they do not lie so.
inline bool lines_of(const Rows& rows, int64_t span, Lines* lines) {
  lines->data = rows.data;
  if (rows.dims <= 1) {
    lines->row_stride = rows.strides[0];
    lines->span_stride = span * rows.strides[0];
    return true;
  }
  lines->row_stride = rows.strides[1];
  lines->span_stride = rows.strides[0];
  return rows.dims == 2 && rows.sizes[1] == span;
}

inline bool lines_of(const Modulation& modulation, Lines* lines) { return lines_of(modulation.rows, 1, lines); }

// What blocks of several rows share, each row with a group of threads, a power of two up to a warp or whole warps.

// For the threads of one row.
__device__ __forceinline__ void synchronize_group() {
  if (blockDim.x <= kWarp) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.y), "r"(blockDim.x) : "memory");
  }
}

// Sums over the threads of a row, each of which gets them. `scratch`: for each warp of the block; it may be used again
// by the next call but one.
__device__ __forceinline__ void sum_over_group(float (&sums)[4], float4* scratch) {
  const int group = blockDim.x, lane = threadIdx.x % kWarp, warps = group / kWarp;
  int distance = min(group, kWarp);
#pragma unroll 1
  for (bool of_warps = false;; of_warps = true) {
#pragma unroll 1
    while ((distance /= 2) > 0) {
#pragma unroll
      for (float& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    if (warps <= 1 || of_warps) return;
    float4* const own = scratch + threadIdx.y * warps;
    if (lane == 0) own[threadIdx.x / kWarp] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    synchronize_group();
    const float4 more = lane < warps ? own[lane] : float4{};
    sums[0] = more.x;
    sums[1] = more.y;
    sums[2] = more.z;
    sums[3] = more.w;
    distance = kWarp;
  }
}

// Adds up what the groups of a block have summed, [kinds][vectors of a thread][quads of a vector][threads] in `memory`,
// and writes it to `partial`, [kinds][hidden]. All threads call it, when each has written its own.
template <int kQuads>
__device__ __forceinline__ void store_sums(float4* memory, int loads, int kinds, int hidden, float* partial) {
  const int group = blockDim.x, threads = blockDim.x * blockDim.y, number = threadIdx.y * blockDim.x + threadIdx.x;
  // Half of them are added to the other half.
#pragma unroll 1
  for (int rows = blockDim.y; rows > 1;) {
    const int half = (rows + 1) / 2;
    __syncthreads();
    if (static_cast<int>(threadIdx.y) + half < rows) {
#pragma unroll 1
      for (int i = 0; i < kinds * loads * kQuads; ++i) {
        float4& sum = memory[i * threads + number];
        const float4 more = memory[i * threads + number + half * group];
        sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
      }
    }
    rows = half;
  }
  __syncthreads();
  const int quads = (hidden + 3) / 4;
#pragma unroll 1
  for (int i = number; i < kinds * quads; i += threads) {
    const int kind = i / quads, quad = i - kind * quads, vector = quad / kQuads, load = vector / group;
    const float4 sum = memory[((kind * loads + load) * kQuads + quad % kQuads) * threads + vector - load * group];
    float* const to = partial + static_cast<int64_t>(kind) * hidden + 4 * quad;
    if (hidden % 4 == 0) {
      *reinterpret_cast<float4*>(to) = sum;
      continue;
    }
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (4 * quad + j < hidden) to[j] = values[j];
    }
  }
}

// What is of the type of the rows, T, or float32.
template <typename T, int kWidth>
__device__ __forceinline__ void load_either(const void* from, Type type, int64_t index, float (&values)[kWidth]) {
  if (sizeof(T) == sizeof(float) || type == Type::float32) {
    load_floats(static_cast<const float*>(from) + index, values);
  } else {
    const auto vector = load<T, kWidth>(static_cast<const T*>(from) + index);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = decode(vector.elements[i]);
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_either(void* to, Type type, int64_t index, const float (&values)[kWidth]) {
  if (sizeof(T) == sizeof(float) || type == Type::float32) {
    store_floats(static_cast<float*>(to) + index, values);
  } else {
    Vector<T, kWidth> vector;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector.elements[i] = encode<T>(values[i]);
    store(static_cast<T*>(to) + index, vector);
  }
}

// Some kernels are in the code for 9.0 and 10.0 only: in all of it they would make the package too large.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100
constexpr bool kAllKernels = true;
#else
constexpr bool kAllKernels = false;
#endif

// Whether such is the code that runs on the current device.
inline bool has_all_kernels(const void* kernel) {
  const int architecture = compiled_capability(kernel);
  return architecture >= 90 && architecture < 110;
}

// Beyond so many bytes of shared memory for a block, a kernel has to ask. What is not dynamic is counted in; here it is
// what sums between warps take, at most.
constexpr size_t kUsualBytes = 48 * 1024, kStaticBytes = 1024;

// What a processor of the current device has, and the most that one of its blocks may have; 0 if that cannot be told.
inline size_t attribute_of_device(cudaDeviceAttr attribute) {
  int device, value;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? static_cast<size_t>(value) : 0;
}
inline size_t shared_bytes_of_processor() { return attribute_of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor); }
inline size_t most_shared_bytes() { return attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Whether to ask for what a call reads before it may be read. Of a call that moves less, the kernel in front has left
// most in the L2 cache, and to ask for that costs up to 4% of the time of both.
inline bool ask_early(int64_t bytes_moved) {
  return bytes_moved > static_cast<int64_t>(attribute_of_device(cudaDevAttrL2CacheSize) / 2);
}

// Where the rows of a launch begin, of fewer than 2^31: with a span, or within one that they do not leave.
struct First {
  int64_t row, span;
  Divider spans;  // of the launch's rows
};

// Calls `launch` for one such part of all rows after another.
template <typename Launch>
cudaError_t launch_in_parts(int64_t rows, int64_t span, Launch&& launch) {
  const int64_t most = INT32_MAX, divisor = std::min(span, most);
  First first{0, 0, Divider(static_cast<uint32_t>(divisor))};
  while (first.row < rows) {
    first.span = first.row / span;
    const int64_t whole = divisor < most ? most / span * span : (first.span + 1) * span - first.row;
    const int64_t part = std::min({rows - first.row, whole, most});
    const cudaError_t error = launch(static_cast<unsigned>(part), first);
    if (error != cudaSuccess) return error;
    first.row += part;
  }
  return cudaSuccess;
}

inline int64_t bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }

inline bool aligned(const Modulation& modulation) { return kit::aligned(modulation.rows, bytes_of(modulation.type)); }
using kit::aligned;

// The dtype that the modulations and parameters of a problem have in common.
class CommonType {
 public:
  // None: the rows' dtype.
  explicit CommonType(Type rows) : type_(rows) {}

  void add(const void* data, Type type) {
    if (data == nullptr) return;
    one_ = one_ && (!any_ || type == type_);
    type_ = type;
    any_ = true;
  }
  void add(const Modulation& modulation) { add(modulation.rows.data, modulation.type); }
  void add(const Parameter& parameter) { add(parameter.data, parameter.type); }

  bool one() const { return one_; }  // whether there is one
  Type type() const { return type_; }

 private:
  Type type_;
  bool any_ = false, one_ = true;
};

}  // namespace adaln
