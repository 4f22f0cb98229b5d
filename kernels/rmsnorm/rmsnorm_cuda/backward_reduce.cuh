// RMSNorm, backward: the second stage of the reduction that gives the gradient of the weight.
//
// Reads:    the partial sums of each block of the first stage, each once.
// Writes:   the gradient of the weight.
// Must not: use atomics: equal inputs give equal bits.
#pragma once

#include "kit/launch.cuh"
#include "kit/two_stage_reduction.cuh"
#include "rmsnorm_cuda/device.cuh"

namespace rmsnorm {

// A block has kDown rows of kAcross threads and reduces kAcross * kPartialWidth columns: first each row of threads adds
// some of the parts, then one thread per column adds the sums of the warps. Most of the time is launch latency, so as
// little work as possible follows the grid wait. kBatch: parts that a thread loads at a time.
template <typename W, int kAcross, int kDown, int kBatch>
__global__ void LAUNCH_BOUNDS(kAcross* kDown, 1)
    reduce_kernel(const float* partial, int64_t parts, int64_t hidden, W* out) {
  constexpr int kThreads = kAcross * kDown, kColumns = kAcross * kPartialWidth;
  __shared__ alignas(16) float warp_sums[kThreads / kWarp][kColumns];
  const int across = threadIdx.x % kAcross * kPartialWidth, row = threadIdx.x / kAcross;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kColumns;
  const int64_t columns_left = hidden - first_column - across;
  const float* from = partial + row * hidden + first_column + across;
  int64_t step = kDown * hidden;
  trigger_next_grid();
  hide(from, step);  // computed before the wait
  grid_wait();
  float sums[kPartialWidth] = {};
  if (columns_left > 0) {
    add_partials<kBatch>(from, step, row, kDown, static_cast<int>(parts), hidden, columns_left, sums);
  }
#pragma unroll
  for (int distance = kAcross; distance < kWarp; distance *= 2) {
#pragma unroll
    for (int j = 0; j < kPartialWidth; ++j) sums[j] += shuffle_xor(sums[j], distance);
  }
  if (threadIdx.x % kWarp < kAcross) {
    *reinterpret_cast<float4*>(&warp_sums[threadIdx.x / kWarp][across]) =
        make_float4(sums[0], sums[1], sums[2], sums[3]);
  }
  __syncthreads();
  if (threadIdx.x >= kColumns || first_column + threadIdx.x >= hidden) return;
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) sum += warp_sums[warp][threadIdx.x];
  out[first_column + threadIdx.x] = encode<W>(sum);
}

}  // namespace rmsnorm
