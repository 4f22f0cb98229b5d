// What the kernels in both directions share: what is read ahead, the factors of a row, and sums over its threads.
//
// A row is read by up to a warp of threads, a power of two, with several rows in a block; or by a whole block. Thread t
// of them holds the vectors t, t + threads, t + 2 * threads, ... of the row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kit/async_copy.cuh"
#include "kit/elements.cuh"
#include "rmsnorm/problem.h"

namespace rmsnorm {

using namespace kit;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMostThreads = 512;  // of a row that registers hold
constexpr int kMostWarps = kMostThreads / kWarp;
constexpr int kLongBlock = 1024;  // threads of a row that registers do not hold

// Makes the compiler forget what it knows of a vector. Otherwise it keeps the elements decoded from one use to the
// next, in twice the registers, which costs more than to decode them again.
template <typename T, int kWidth>
__device__ __forceinline__ void forget(Vector<T, kWidth>& vector) {
  if constexpr (sizeof(vector) == 16 && sizeof(T) < 4) {
    uint4 word;
    memcpy(&word, &vector, sizeof(word));
    asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
    memcpy(&vector, &word, sizeof(word));
  }
}

// --- elements
// ---------------------------------------------------------------------------------------------------------

// Elements rounded two at a time, which is one instruction.
template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> encode_all(const float (&values)[kWidth]) {
  Vector<T, kWidth> vector;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (kWidth % 2 == 0 && sizeof(T) == 2) {
      if (i % 2 != 0) continue;
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(values[i], values[i + 1]);
        memcpy(&vector.elements[i], &pair, sizeof(pair));
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
        memcpy(&vector.elements[i], &pair, sizeof(pair));
      }
    } else {
      vector.elements[i] = encode<T>(values[i]);
    }
  }
  return vector;
}

// The factors of a vector of columns, in two steps, so that they can be on their way while the row is summed. Factors
// of float32 beside smaller elements take too many registers for that: they are read when they are needed.
template <typename T, int kWidth>
class Factors {
 public:
  __device__ __forceinline__ void start(const Weight& weight, int64_t column) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector_.elements[i] = encode<T>(1.0f);
    if (weight.data != nullptr && is_like_rows(weight)) {
      vector_ = load<T, kWidth>(static_cast<const T*>(weight.data) + column);
    }
  }

  // Of a weight like the rows, which is there where `read` says so.
  __device__ __forceinline__ void start_plain(const Weight& weight, int64_t column, bool read) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector_.elements[i] = encode<T>(1.0f);
    if (read) vector_ = load<T, kWidth>(static_cast<const T*>(weight.data) + column);
  }

  __device__ __forceinline__ void finish_plain(const Weight& weight, float (&factors)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factors[i] = decode(vector_.elements[i]) + weight.offset;
  }

  __device__ __forceinline__ void finish(const Weight& weight, int64_t column, float (&factors)[kWidth]) const {
    if (is_like_rows(weight)) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) factors[i] = decode(vector_.elements[i]);
    } else {
      load_floats(static_cast<const float*>(weight.data) + column, factors);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factors[i] += weight.offset;
  }

  // In one step, from a column that need not be a multiple of the vector.
  static __device__ __forceinline__ void read(const Weight& weight, int64_t column, float (&factors)[kWidth]) {
    if (is_like_rows(weight)) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        factors[i] = weight.data == nullptr ? 1.0f : decode(static_cast<const T*>(weight.data)[column + i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) factors[i] = static_cast<const float*>(weight.data)[column + i];
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factors[i] += weight.offset;
  }

  __device__ __forceinline__ void forget() { rmsnorm::forget(vector_); }

 private:
  static __device__ __forceinline__ bool is_like_rows(const Weight& weight) {
    return sizeof(T) == sizeof(float) || weight.data == nullptr || weight.type != Type::float32;
  }

  Vector<T, kWidth> vector_;
};

// --- sums
// -------------------------------------------------------------------------------------------------------------

// Sums over neighbouring lanes, `width` of them, a power of two.
template <int kSums>
__device__ __forceinline__ void sum_over_lanes(float (&sums)[kSums], int width) {
  for (int distance = width / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] += __shfl_xor_sync(kAllLanes, sums[i], distance);
  }
}

// The sum over a block of at most kWarps warps, which call this once.
template <int kWarps>
__device__ __forceinline__ float sum_over_block(float value, float4 (&scratch)[kWarps / 4]) {
  float sums[1] = {value};
  sum_over_lanes(sums, kWarp);
  const int warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) reinterpret_cast<float*>(scratch)[threadIdx.x / kWarp] = sums[0];
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; i += 4) {
    if (i >= warps) break;
    const float4 four = scratch[i / 4];
    sum += (four.x + (i + 1 < warps ? four.y : 0.0f)) +
           ((i + 2 < warps ? four.z : 0.0f) + (i + 3 < warps ? four.w : 0.0f));
  }
  return sum;
}

__device__ __forceinline__ float reciprocal_norm(float sum_of_squares, float inverse_of_hidden, float eps) {
  return rsqrtf(sum_of_squares * inverse_of_hidden + eps);
}

}  // namespace rmsnorm
