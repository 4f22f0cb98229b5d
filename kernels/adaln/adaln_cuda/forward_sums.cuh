// Sums over the threads of a row, for forward norms.
//
// Reads:    registers of the block.
// Must not: use atomics; the order of every sum is fixed.
#pragma once

#include "kit/vectors.cuh"

namespace adaln {

using namespace kit;

// Adds differences from `pivot` and their squares.
template <int kWidth>
__device__ __forceinline__ void add_differences(const float (&x)[kWidth], bool has, float pivot, float& sum,
                                                float& sum_of_squares) {
  float differences = 0.0f, squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float away = x[j] - pivot;
    differences += away;
    squares += away * away;
  }
  sum += has ? differences : 0.0f;
  sum_of_squares += has ? squares : 0.0f;
}

// Sums values over groups of kLanes lanes; each lane gets the totals.
template <int kLanes, int kValues>
__device__ __forceinline__ void sum_over_lanes(float (&values)[kValues]) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) values[k] += shuffle_xor(values[k], distance);
  }
}

// Sums over a block of whole warps; each thread gets the totals.
template <int kSums, int kMaxWarps>
__device__ __forceinline__ void sum_over_block(float (&sums)[kSums], float (&scratch)[kMaxWarps][kSums]) {
  static_assert(kSums == 2 || kSums == 4);
  using Part = typename Word<kSums * sizeof(float)>::Type;
  sum_over_lanes<kWarp>(sums);
  if (threadIdx.x % kWarp == 0) {
    // As one word: clang does not know the alignment that memcpy may assume here, and stores byte by byte.
    Part part;
    memcpy(&part, sums, sizeof(part));
    *reinterpret_cast<Part*>(scratch[threadIdx.x / kWarp]) = part;
  }
  __syncthreads();
  const int warps = blockDim.x / kWarp;
#pragma unroll
  for (int k = 0; k < kSums; ++k) sums[k] = 0.0f;
#pragma unroll 4
  for (int warp = 0; warp < warps; ++warp) {
    const Part part = *reinterpret_cast<const Part*>(scratch[warp]);
    float parts[kSums];
    memcpy(parts, &part, sizeof(part));
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k] += parts[k];
  }
}

// The variance from the averages of differences from one of the row's elements and of their squares. These are not much
// larger than those of differences from the mean, so a row far from zero keeps its digits.
__device__ __forceinline__ float variance_of(float difference, float square) {
  const float variance = square - difference * difference;
  return variance < 0.0f ? 0.0f : variance;  // NaN stays NaN
}

// Threads, in whole warps, that hold a row of the given number of vectors.
constexpr int threads_for(int64_t vectors, int vectors_per_thread) {
  return static_cast<int>((vectors + vectors_per_thread * kWarp - 1) / (vectors_per_thread * kWarp) * kWarp);
}

}  // namespace adaln
