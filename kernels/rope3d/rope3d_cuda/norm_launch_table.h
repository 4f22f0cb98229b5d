// Launch configurations of RMSNorm with rotary embedding. To tune it for another GPU, edit this file and nothing else.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
#pragma once

#include <iterator>

namespace rope3d {

struct NormLaunch {
  // Which calls the row is for.
  bool backward;
  bool split;          // two vectors per column, for half-split pairs; else one
  bool row_per_block;  // rows of a whole block; else of a power of two of lanes of a warp, with a column in each

  int threads;         // per block, with row_per_block the most; these and threads_per_sm are the __launch_bounds__
  int threads_per_sm;  // backward: blocks loop over rows, so an SM gets blocks of this many threads, or one block
  int heads;           // of each tensor, per thread; 1 with row_per_block
  int columns;         // of each of these heads or rows, per thread; 1 without row_per_block
};

// With the registers that 640 threads leave, clang's code would spill some.
#if defined(__clang__)
constexpr int kLanesThreadsPerSm = 512;
#else
constexpr int kLanesThreadsPerSm = 640;
#endif

// The first row that matches and has enough threads for a row is used.
//
// The columns of a thread in q and k share their angles: the tables are up to twice as many bytes as q. Forward, with
// four heads of each tensor, all threads have the same work where k has a quarter of the heads of q; models with
// adjacent pairs have as many. The backward pass holds x, the gradient and the sums of the weights' gradients. Longer
// rows take the general kernel.
//
// threads_per_sm: the pass waits for its instructions, not for memory, so as many threads as have the registers (H100
// and H200). With more, registers spill. Blocks beyond what an SM can hold would run after the others.
constexpr NormLaunch kNormLaunches[] = {
    {/*backward=*/false, /*split=*/false, /*row_per_block=*/false, /*threads=*/256, /*threads_per_sm=*/0, /*heads=*/2,
     /*columns=*/1},
    {/*backward=*/false, /*split=*/true, /*row_per_block=*/false, /*threads=*/256, /*threads_per_sm=*/0, /*heads=*/4,
     /*columns=*/1},
    {/*backward=*/false, /*split=*/false, /*row_per_block=*/true, /*threads=*/512, /*threads_per_sm=*/0, /*heads=*/1,
     /*columns=*/2},
    {/*backward=*/false, /*split=*/true, /*row_per_block=*/true, /*threads=*/512, /*threads_per_sm=*/0, /*heads=*/1,
     /*columns=*/2},
    {/*backward=*/true, /*split=*/false, /*row_per_block=*/false, /*threads=*/128,
     /*threads_per_sm=*/kLanesThreadsPerSm, /*heads=*/2, /*columns=*/1},
    {/*backward=*/true, /*split=*/true, /*row_per_block=*/false, /*threads=*/128,
     /*threads_per_sm=*/kLanesThreadsPerSm, /*heads=*/2, /*columns=*/1},
    {/*backward=*/true, /*split=*/false, /*row_per_block=*/true, /*threads=*/768, /*threads_per_sm=*/768, /*heads=*/1,
     /*columns=*/1},
    {/*backward=*/true, /*split=*/true, /*row_per_block=*/true, /*threads=*/768, /*threads_per_sm=*/768, /*heads=*/1,
     /*columns=*/1},
};

// Elements of a vector. A column has 16 bytes in either case: with two vectors of 16 bytes, the backward pass spills
// registers.
constexpr int norm_width(bool split, int element_bytes) { return (split ? 8 : 16) / element_bytes; }

// The general kernel: threads of a row at most, and blocks of an SM in the backward pass.
constexpr int kGeneralThreads = 256, kGeneralBlocksPerSm = 8;

// The reduction of partial sums: threads across the columns of a part and down the parts, and loads in flight.
constexpr int kReduceAcross = 4, kReduceDown = 64, kReduceBatch = 4;

}  // namespace rope3d
