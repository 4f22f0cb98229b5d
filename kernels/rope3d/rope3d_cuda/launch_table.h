// Launch configurations of rope3d. To tune the kernels for another GPU, edit the tables in this file and nothing else.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
#pragma once

#include <cstdint>

#include "kit/launch_table.h"

namespace rope3d {

enum class Pass : unsigned { forward = 1, backward = 2 };

// The vectors of a column: two for half-split pairs and for heads that are not 16-byte aligned.
enum class ColumnVectors : unsigned { one = 4, two = 8 };

struct LaunchConfig : kit::LaunchKey<LaunchConfig> {
  // Threads. Heads of a thread: an even number, of one tensor, or, for interleaved axes, half of q and half of k.
  LAUNCH_FIELD(int, heads_per_thread, 2)
  LAUNCH_FIELD(int, max_threads, 512)          // per block; also the __launch_bounds__, which set the registers
  LAUNCH_FIELD(int, min_threads, 128)          // per block: it takes more tokens until it has that many
  LAUNCH_FIELD(int, token_major_threads, 256)  // per block if the stride of a token is smaller than that of a head
  LAUNCH_FIELD(int, small_launch_per_sm, 496)  // launches of fewer threads get one head of each tensor per thread, and
  LAUNCH_FIELD(int, small_launch_threads, 64)  // at most this many threads for a block's heads (token-major: tokens)

  // Order of blocks.
  LAUNCH_FIELD(int64_t, side_blocks, 64)               // for tables per token: this many blocks of q, then as many of k
  LAUNCH_FIELD(int64_t, max_interleaved_sequences, 4)  // up to this many that share a table have interleaved tokens

  // PDL: launches of up to this many blocks trigger the next kernel first, without a prefetch.
  LAUNCH_FIELD(int64_t, early_trigger_blocks, 64)
};

// The kernel is compiled for each row that can serve the dtype.
//
// Tuned on an H100 80GB HBM3 (132 SMs, 50 MB L2) in bfloat16, where calls of 22 MB to 968 MB reach 1.00 to 1.05 of copy
// speed. Reasons:
//   heads_per_thread      More heads share more of the index arithmetic, but memory is fastest when blocks are short.
//   max_threads           A block takes all heads of a token if they fit: memory is fastest in long contiguous pieces.
//                         A column of two vectors needs more registers, so its blocks are smaller.
//   small_launch_per_sm   Smaller launches do not fill the SMs, so they get more and smaller blocks.
//   side_blocks           The table rows that q has loaded are still in the cache when k needs them.
//   max_interleaved_sequences
//                         A shared table row is still in the cache for the next sequence. Memory is slower the more
//                         places are read at a time, so more sequences are not interleaved.
//   early_trigger_blocks  This few blocks leave room on the SMs for those of the next kernel.
constexpr LaunchConfig kLaunchTable[] = {
    LaunchConfig().for_variants(ColumnVectors::one),
    LaunchConfig().for_variants(ColumnVectors::two).with_max_threads(256),
};
static_assert(kit::serves_all(kLaunchTable, ColumnVectors::one) && kit::serves_all(kLaunchTable, ColumnVectors::two),
              "a row for every call is missing");

// --- RMSNorm with rotary embedding

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
