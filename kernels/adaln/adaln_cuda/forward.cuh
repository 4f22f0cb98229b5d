// What the kernels of modulated norms share: sums over the threads of a row; and where rows go that registers do not
// hold.
#pragma once

#include "adaln_cuda/device.cuh"

namespace adaln {

constexpr int kMostThreads = 512, kBlocks = 2;  // of a block, and of a processor
constexpr int kMostWarps = kMostThreads / kWarp;

template <typename T>
using VectorOf = Vector<T, kVectorBytes / static_cast<int>(sizeof(T))>;

template <typename T>
__device__ __forceinline__ VectorOf<T> vector_of(uint4 word) {
  VectorOf<T> vector;
  memcpy(&vector, &word, sizeof(vector));
  return vector;
}

// Sums of differences from `pivot`, and of their squares.
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

// Sums of several values over groups of so many lanes, each of which gets them.
template <int kLanes, int kValues>
__device__ __forceinline__ void sum_over_lanes(float (&values)[kValues]) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) values[k] += __shfl_xor_sync(kAllLanes, values[k], distance);
  }
}

// Over a block of whole warps. All threads get the same.
template <int kSums>
__device__ __forceinline__ void sum_over_block(float (&sums)[kSums], float (&scratch)[kMostWarps][kSums]) {
  static_assert(kSums == 2 || kSums == 4);
  using Part = typename Word<kSums * sizeof(float)>::Type;
  sum_over_lanes<kWarp>(sums);
  if (threadIdx.x % kWarp == 0) memcpy(scratch[threadIdx.x / kWarp], sums, sizeof(sums));
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

// Averages of differences from one of a row's elements, and of their squares, are not far larger than of those from its
// mean, so that a row far from zero keeps its digits.
__device__ __forceinline__ float variance_of(float difference, float square) {
  const float variance = square - difference * difference;
  return variance < 0.0f ? 0.0f : variance;  // what is not a number stays so
}

// Threads, whole warps of them, that hold so many vectors.
constexpr int threads_for(int64_t vectors, int loads) {
  return static_cast<int>((vectors + loads * kWarp - 1) / (loads * kWarp) * kWarp);
}

}  // namespace adaln
