// Sums over the threads of a row, and how rows are laid over blocks.
//
// A row is read by a group of threads: up to a warp of them, a power of two, with several rows in a block; or the whole
// block.
//
// Reads:    nothing.
// Must not: depend on what a kernel sums; use atomics.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace kit {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kSharedBlock = 128;  // threads of a block with several rows
constexpr int kLongBlock = 1024;   // threads of a row that registers do not hold

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
  int block() const { return group * rows; }
};

inline unsigned blocks_for(int64_t rows, const Shape& shape) {
  return static_cast<unsigned>(std::min<int64_t>((rows + shape.rows - 1) / shape.rows, 0x7fffffff));
}

}  // namespace kit
