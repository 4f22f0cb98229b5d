// Device functions of both passes: rounding, the factors of a row, and reductions over the threads of a row.
//
// Reads:    the weight.
// Must not: depend on the pass.
//
// A row is read by a group of threads: a power of two up to a warp, with several rows in a block, or a whole block.
// Thread t of n in a group holds the vectors t, t + n, t + 2 * n, ... of the row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kit/async_copy.cuh"
#include "kit/elements.cuh"
#include "kit/group_sums.cuh"
#include "rmsnorm/problem.h"

namespace rmsnorm {

using namespace kit;

constexpr int kMaxBlockThreads = 1024;  // of every CUDA device

// The factors (weight + offset) of a vector of columns, in two steps: the load is in flight while the row is reduced,
// the conversion follows. float32 weights of 16-bit rows would take too many registers and are loaded in the second
// step.
template <typename T, int kWidth>
class Factors {
 public:
  __device__ __forceinline__ void load_weight(const Weight& weight, int64_t column) {
    load_weight_if(weight, column, weight.data != nullptr && has_row_dtype(weight));
  }

  // For a weight of the rows' dtype. Without `in_range` the weight counts as 1 and nothing is loaded.
  __device__ __forceinline__ void load_weight_if(const Weight& weight, int64_t column, bool in_range) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector_.elements[i] = encode<T>(1.0f);
    if (in_range) vector_ = load<T, kWidth>(static_cast<const T*>(weight.data) + column);
  }

  // After `load_weight_if`.
  __device__ __forceinline__ void decode_loaded(const Weight& weight, float (&factors)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factors[i] = decode(vector_, i) + weight.offset;
  }

  // After `load_weight`.
  __device__ __forceinline__ void get(const Weight& weight, int64_t column, float (&factors)[kWidth]) const {
    if (has_row_dtype(weight)) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) factors[i] = decode(vector_, i);
    } else {
      load_floats(static_cast<const float*>(weight.data) + column, factors);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factors[i] += weight.offset;
  }

  __device__ __forceinline__ void make_opaque() { kit::make_opaque(vector_); }

 private:
  static __device__ __forceinline__ bool has_row_dtype(const Weight& weight) {
    return sizeof(T) == sizeof(float) || weight.data == nullptr || weight.type != Type::float32;
  }

  Vector<T, kWidth> vector_;
};

// Returns the sum over a block of at most kWarps warps. A kernel calls this once: it does not protect `scratch`.
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
