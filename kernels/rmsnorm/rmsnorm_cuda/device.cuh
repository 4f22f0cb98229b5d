// What the kernels in both directions share: elements in vectors, sums over the threads of a row, and how many threads
// a row gets.
//
// A row is read by a group of threads: up to a warp of them, a power of two, with several rows in a block; or the whole
// block. Thread t of the group holds the vectors t, t + group, t + 2 * group, ... of the row, `kLoads` of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "rmsnorm/problem.h"

namespace rmsnorm {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kVectorBytes = 16;
constexpr int kMostLoads = 4;      // vectors of a thread
constexpr int kSharedBlock = 128;  // threads of a block with several rows
constexpr int kLongBlock = 1024;   // threads of a row that registers do not hold

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T elements[kWidth];
};

__device__ __forceinline__ float decode(float value) { return value; }
__device__ __forceinline__ float decode(__half value) { return __half2float(value); }
__device__ __forceinline__ float decode(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T encode(float value);
template <>
__device__ __forceinline__ float encode<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half encode<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 encode<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <size_t kBytes>
struct Word;
template <>
struct Word<2> {
  using Type = uint16_t;
};
template <>
struct Word<4> {
  using Type = uint32_t;
};
template <>
struct Word<16> {
  using Type = uint4;
};

// Vectors move as one word. With a plain assignment the compiler sometimes stores them element by element.
template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> load(const T* from) {
  using Whole = typename Word<sizeof(T) * kWidth>::Type;
  const Whole whole = *reinterpret_cast<const Whole*>(from);
  Vector<T, kWidth> vector;
  memcpy(&vector, &whole, sizeof(whole));
  return vector;
}

template <typename T, int kWidth>
__device__ __forceinline__ void store(T* to, const Vector<T, kWidth>& vector) {
  using Whole = typename Word<sizeof(T) * kWidth>::Type;
  Whole whole;
  memcpy(&whole, &vector, sizeof(whole));
  __stwb(reinterpret_cast<Whole*>(to), whole);
}

// Floats, of which a vector of smaller elements corresponds to several vectors.
template <int kWidth>
constexpr int kFloats = kWidth < 4 ? kWidth : 4;

template <int kWidth>
__device__ __forceinline__ void load_floats(const float* from, float (&values)[kWidth]) {
#pragma unroll
  for (int start = 0; start < kWidth; start += kFloats<kWidth>) {
    const auto vector = load<float, kFloats<kWidth>>(from + start);
#pragma unroll
    for (int i = 0; i < kFloats<kWidth>; ++i) values[start + i] = vector.elements[i];
  }
}

template <int kWidth>
__device__ __forceinline__ void store_floats(float* to, const float (&values)[kWidth]) {
#pragma unroll
  for (int start = 0; start < kWidth; start += kFloats<kWidth>) {
    Vector<float, kFloats<kWidth>> vector;
#pragma unroll
    for (int i = 0; i < kFloats<kWidth>; ++i) vector.elements[i] = values[start + i];
    store(to + start, vector);
  }
}

// The factors of the elements from `column` on.
template <typename T, int kWidth>
__device__ __forceinline__ void load_weight(const Weight& weight, int64_t column, float (&factors)[kWidth]) {
  if (weight.data == nullptr) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factors[i] = 1.0f;
  } else if (sizeof(T) == sizeof(float) || weight.type != Type::float32) {
    const auto vector = load<T, kWidth>(static_cast<const T*>(weight.data) + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factors[i] = decode(vector.elements[i]);
  } else {
    load_floats(static_cast<const float*>(weight.data) + column, factors);
  }
}

template <typename T>
__device__ __forceinline__ const T* row_of(const Rows& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + rows.offset(row);
}

__device__ __forceinline__ float reciprocal_norm(float sum_of_squares, int64_t hidden, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(hidden) + eps);
}

// Sums over a group of threads. All threads of the block call it together, and all of a group get the same sums.
template <int kSums>
class GroupSum {
 public:
  using Scratch = float[2][kSums][kWarp];

  __device__ GroupSum(Scratch& scratch, int group) : scratch_(scratch), group_(group) {}

  __device__ void operator()(float (&sums)[kSums]) {
    within_warp(sums, group_ < kWarp ? group_ : kWarp);
    if (group_ <= kWarp) return;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = group_ / kWarp;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) scratch_[half_][i][warp] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = lane < warps ? scratch_[half_][i][lane] : 0.0f;
    within_warp(sums, kWarp);
    half_ ^= 1;  // the next call may write while a slow warp still reads
  }

 private:
  __device__ static void within_warp(float (&sums)[kSums], int width) {
    for (int distance = width / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], distance);
    }
  }

  Scratch& scratch_;
  int group_;
  int half_ = 0;
};

// How a row is laid over threads.
struct Shape {
  int group;  // threads for a row
  int rows;   // rows in a block
  int loads;  // vectors of a thread; 0: the row does not fit in registers
  int block() const { return group * rows; }
};

// `limit`: the most threads that a block may have. `loads`: as many as a thread should have where the block allows it.
inline Shape shape_of(int64_t hidden, int width, int limit, int loads) {
  const int64_t vectors = (hidden + width - 1) / width;
  if (vectors > static_cast<int64_t>(limit) * kMostLoads) return {kLongBlock, 1, 0};
  const int count = static_cast<int>(vectors);
  if (count > kWarp * kMostLoads) {
    if (count > limit * loads) loads = kMostLoads;
    const int threads = (count + loads - 1) / loads;
    return {(threads + kWarp - 1) / kWarp * kWarp, 1, loads};
  }
  loads = 1;
  while (kWarp * loads < count) loads *= 2;
  int group = 1;
  while (group * loads < count) group *= 2;
  return {group, kSharedBlock / group, loads};
}

inline unsigned blocks_for(int64_t rows, const Shape& shape) {
  return static_cast<unsigned>(std::min<int64_t>((rows + shape.rows - 1) / shape.rows, 0x7fffffff));
}

inline bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; }

// Whether every row starts at a multiple of the vector size. True when there is no such tensor.
inline bool aligned(const Rows& rows, int64_t element) {
  bool all = aligned(rows.data);
  for (int dim = 0; dim < rows.dims; ++dim) all = all && rows.strides[dim] * element % kVectorBytes == 0;
  return all;
}

}  // namespace rmsnorm
