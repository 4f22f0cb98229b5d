// Launch configurations of RMSNorm with rotary embedding. To tune it for another GPU, edit this file and nothing else.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
#pragma once

#include <iterator>

namespace rope3d {

struct NormLaunch {
  // Which calls the row is for.
  bool split;          // two vectors per column, for half-split pairs; else one
  bool row_per_block;  // rows of a whole block; else of a power of two of lanes of a warp, with a column in each

  // Threads.
  int threads;  // per block; with row_per_block the most. Also the __launch_bounds__
  int heads;    // of each tensor, per thread; 1 with row_per_block
  int columns;  // of each of these heads or rows, per thread; 1 without row_per_block

  // Backward: `threads` again, which decides how many registers a thread has; and blocks loop over rows, so an SM gets
  // blocks of backward_threads_per_sm threads, or one block.
  int backward_threads, backward_threads_per_sm;
};

// The first row that matches and has enough threads for a row is used.
//
// A thread has four columns, two of q and two of k, which share the angles of a column: the tables are up to twice as
// many bytes as q. More would not leave the backward pass of a long row enough registers: it holds x, the gradient and
// the sums of the weights' gradients.
//
// backward_threads: at 512 threads, 16-bit rows spill registers. Longer rows take the general kernel.
// backward_threads_per_sm: each block writes partial sums of a whole row, so fewer blocks write less.
constexpr NormLaunch kNormLaunches[] = {
    {/*split=*/false, /*row_per_block=*/false, /*threads=*/256, /*heads=*/2, /*columns=*/1,
     /*backward_threads=*/256, /*backward_threads_per_sm=*/512},
    {/*split=*/true, /*row_per_block=*/false, /*threads=*/256, /*heads=*/2, /*columns=*/1,
     /*backward_threads=*/256, /*backward_threads_per_sm=*/512},
    {/*split=*/false, /*row_per_block=*/true, /*threads=*/512, /*heads=*/1, /*columns=*/2,
     /*backward_threads=*/384, /*backward_threads_per_sm=*/512},
    {/*split=*/true, /*row_per_block=*/true, /*threads=*/512, /*heads=*/1, /*columns=*/2,
     /*backward_threads=*/384, /*backward_threads_per_sm=*/512},
};

// Elements of a vector. A column has 16 bytes in either case: with two vectors of 16 bytes, the backward pass spills
// registers.
constexpr int norm_width(bool split, int element_bytes) { return (split ? 8 : 16) / element_bytes; }

// The general kernel: threads of a row at most, and blocks of an SM in the backward pass.
constexpr int kGeneralThreads = 256, kGeneralBlocksPerSm = 8;

// The reduction of partial sums: threads across the columns of a part and down the parts, and loads in flight.
constexpr int kReduceAcross = 4, kReduceDown = 64, kReduceBatch = 4;

}  // namespace rope3d
