// Sums in blocks that work on several rows at a time. Each row has a group of threads: a power of two up to a warp, or
// whole warps. Blocks are (threads of a row, rows).
//
// Reads:    registers and shared memory of the block.
// Writes:   partial sums of columns, to global memory.
// Must not: use atomics; the order of every sum is fixed.
#pragma once

#include <cstdint>

#include "kit/elements.cuh"

namespace kit {

// Sums over `width` neighbouring lanes, a power of two. Every lane gets the sums.
template <int kSums>
__device__ __forceinline__ void sum_over_lanes(float (&sums)[kSums], int width) {
  for (int distance = width / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] += shuffle_xor(sums[i], distance);
  }
}

// Sums over a block of whole warps, which is one row; each thread gets the totals. `scratch` is 16-byte aligned, and
// may be used again after the next __syncthreads.
template <int kSums, int kMaxWarps>
__device__ __forceinline__ void sum_over_block(float (&sums)[kSums], float (&scratch)[kMaxWarps][kSums]) {
  static_assert(kSums == 2 || kSums == 4);
  using Part = typename Word<kSums * sizeof(float)>::Type;
  sum_over_lanes(sums, kWarp);
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

// Sums over the threads of a row; each of them gets the totals. `scratch` has an element for each warp of the block. It
// may be used again by the next call but one, so callers alternate between two.
__device__ __forceinline__ void sum_over_group(float (&sums)[4], float4* scratch) {
  const int group = blockDim.x, lane = threadIdx.x % kWarp, warps = group / kWarp;
  int distance = min(group, kWarp);
#pragma unroll 1
  for (bool over_warps = false;; over_warps = true) {
#pragma unroll 1
    while ((distance /= 2) > 0) {
#pragma unroll
      for (float& sum : sums) sum += shuffle_xor(sum, distance);
    }
    if (warps <= 1 || over_warps) return;
    float4* const row_scratch = scratch + threadIdx.y * warps;
    if (lane == 0) row_scratch[threadIdx.x / kWarp] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    synchronize_warps(threadIdx.y, group);
    const float4 warp_sums = lane < warps ? row_scratch[lane] : float4{};
    sums[0] = warp_sums.x;
    sums[1] = warp_sums.y;
    sums[2] = warp_sums.z;
    sums[3] = warp_sums.w;
    distance = kWarp;
  }
}

// Adds up the column sums of a block's rows, [sums][rows][quads of a row], and writes them to `partial`,
// [sums][hidden]. `thread`: of `threads`, which all call it.
__device__ __forceinline__ void store_partial_sums(const float4* memory, int thread, int threads, int sum_count,
                                                   int quads, float* partial) {
  const int rows = blockDim.y;
#pragma unroll 1
  for (int quad = thread; quad < quads * sum_count; quad += threads) {
    const float4* const row_sums = memory + quad + quad / quads * (rows - 1) * quads;
    float4 sum = row_sums[0];
#pragma unroll 4
    for (int row = 1; row < rows; ++row) {
      const float4 other = row_sums[row * quads];
      sum.x += other.x;
      sum.y += other.y;
      sum.z += other.z;
      sum.w += other.w;
    }
    reinterpret_cast<float4*>(partial)[quad] = sum;
  }
}

}  // namespace kit
