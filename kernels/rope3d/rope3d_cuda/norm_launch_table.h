// Launch configurations of RMSNorm with rotary embedding. To tune it for another GPU, edit this file and nothing else.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
#pragma once

#include "rope3d_cuda/launch_table.h"

namespace rope3d {

struct NormLaunch : kit::LaunchKey<NormLaunch> {
  LAUNCH_FIELD(bool, row_per_block, false)  // rows of a whole block; else of lanes of a warp, a column in each

  LAUNCH_FIELD(int, threads, 256)  // per block, with row_per_block the most; with threads_per_sm the launch bounds
  // Backward, blocks loop over rows: an SM gets blocks of this many threads, or one block.
  LAUNCH_FIELD(int, threads_per_sm, 0)
  LAUNCH_FIELD(int, heads, 1)    // of each tensor, per thread; 1 with row_per_block
  LAUNCH_FIELD(int, columns, 1)  // of each of these heads or rows, per thread; 1 without row_per_block
};

// With the registers that 640 threads leave, clang's code would spill some.
#if defined(__clang__)
constexpr int kLanesThreadsPerSm = 512;
#else
constexpr int kLanesThreadsPerSm = 640;
#endif

// The first row that serves the call and has enough threads for a row is used.
//
// The columns of a thread in q and k share their angles: the tables are up to twice as many bytes as q. Forward, with
// four heads of each tensor, all threads have the same work where k has a quarter of the heads of q; models with
// adjacent pairs have as many. The backward pass holds x, the gradient and the sums of the weights' gradients. Longer
// rows take the general kernel.
//
// threads_per_sm: the pass waits for its instructions, not for memory, so as many threads as have the registers (H100
// and H200). With more, registers spill. Blocks beyond an SM's capacity would run after the others.
constexpr NormLaunch kRowPerBlock = NormLaunch().with_row_per_block(true);
constexpr NormLaunch kForwardBlock = kRowPerBlock.with_threads(512).with_columns(2);
constexpr NormLaunch kBackwardBlock = kRowPerBlock.with_threads(768).with_threads_per_sm(768);
constexpr NormLaunch kBackwardLanes =
    NormLaunch().with_threads(128).with_threads_per_sm(kLanesThreadsPerSm).with_heads(2);

constexpr NormLaunch kNormLaunches[] = {
    NormLaunch().for_variants(Pass::forward, ColumnVectors::one).with_heads(2),
    NormLaunch().for_variants(Pass::forward, ColumnVectors::two).with_heads(4),
    kForwardBlock.for_variants(Pass::forward, ColumnVectors::one),
    kForwardBlock.for_variants(Pass::forward, ColumnVectors::two),
    kBackwardLanes.for_variants(Pass::backward, ColumnVectors::one),
    kBackwardLanes.for_variants(Pass::backward, ColumnVectors::two),
    kBackwardBlock.for_variants(Pass::backward, ColumnVectors::one),
    kBackwardBlock.for_variants(Pass::backward, ColumnVectors::two),
};

// Elements of a vector. A column has 16 bytes in either case: with two vectors of 16 bytes, the backward pass spills
// registers.
constexpr int norm_width(bool split, int element_bytes) { return (split ? 8 : 16) / element_bytes; }

// The general kernel: threads of a row at most, and blocks of an SM in the backward pass.
constexpr int kGeneralThreads = 256, kGeneralBlocksPerSm = 8;

// The reduction of partial sums: threads across the columns of a part and down the parts, and loads in flight.
constexpr int kReduceAcross = 4, kReduceDown = 64, kReduceBatch = 4;

}  // namespace rope3d
