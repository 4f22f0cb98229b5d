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

// Synchronizes the threads of one row.
__device__ __forceinline__ void synchronize_group() {
  if (blockDim.x <= kWarp) {
    __syncwarp();
  } else {
    synchronize_warps(threadIdx.y, blockDim.x);
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
    synchronize_group();
    const float4 warp_sums = lane < warps ? row_scratch[lane] : float4{};
    sums[0] = warp_sums.x;
    sums[1] = warp_sums.y;
    sums[2] = warp_sums.z;
    sums[3] = warp_sums.w;
    distance = kWarp;
  }
}

// Adds up the column sums of a block's groups, `memory` of [sums][vectors of a thread][quads of a vector][threads], and
// writes them to `partial`, [sums][hidden]. All threads call it, each after it has written its own column sums.
template <int kQuads>
__device__ __forceinline__ void store_partial_sums(float4* memory, int vectors_per_thread, int sum_count, int hidden,
                                                   float* partial) {
  const int group = blockDim.x, threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  // A tree over rows: each iteration adds the second half to the first.
#pragma unroll 1
  for (int rows = blockDim.y; rows > 1;) {
    const int half = (rows + 1) / 2;
    __syncthreads();
    if (static_cast<int>(threadIdx.y) + half < rows) {
#pragma unroll 1
      for (int i = 0; i < sum_count * vectors_per_thread * kQuads; ++i) {
        float4& sum = memory[i * threads + thread];
        const float4 other = memory[i * threads + thread + half * group];
        sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
      }
    }
    rows = half;
  }
  __syncthreads();
  const int quads = (hidden + 3) / 4;
#pragma unroll 1
  for (int i = thread; i < sum_count * quads; i += threads) {
    const int which = i / quads, quad = i - which * quads, vector = quad / kQuads, load = vector / group;
    const float4 sum =
        memory[((which * vectors_per_thread + load) * kQuads + quad % kQuads) * threads + vector - load * group];
    float* const to = partial + static_cast<int64_t>(which) * hidden + 4 * quad;
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

}  // namespace kit
