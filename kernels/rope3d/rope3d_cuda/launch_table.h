// Launch configurations of rope3d. To tune the kernel for another GPU, edit the table in this file and nothing else.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
#pragma once

#include <cstdint>
#include <iterator>
#include <type_traits>

namespace rope3d {

struct LaunchConfig {
  // Which calls the row is for.
  int min_capability;  // of the compiled code: 90 is 9.0; 0: any
  int element_bytes;   // of q and k: 2 or 4; 0: any
  bool split;          // two vectors per column: half-split pairs, and heads that are not 16-byte aligned; else one

  // Threads.
  int heads_per_thread;      // even: of one tensor, or, for interleaved axes, half of q and half of k
  int max_threads;           // per block; also the __launch_bounds__, from which the compiler derives the registers
  int min_threads;           // per block: it takes more tokens until it has that many
  int token_major_threads;   // per block if tensors are token-major: the stride of a token is smaller than of a head
  int64_t small_launch;      // launches of fewer threads get one head of each tensor per thread, and in each block
  int small_launch_threads;  // at most this many threads for the heads of a token (or, token-major, for the tokens)

  // Order of blocks.
  int64_t side_blocks;                // for tables per token: this many blocks of q, then as many of k
  int64_t max_interleaved_sequences;  // the tokens of up to this many sequences that share a table are interleaved

  // PDL and L2.
  int64_t early_trigger_blocks;  // launches of up to this many blocks trigger the next kernel first, without a prefetch
  int64_t prefetch_min_bytes;    // calls of more bytes, and of more than the L2 cache of the device holds, prefetch
};

// The first row that matches is used: put a row for your GPU or dtype before the general ones. The kernel is compiled
// for each row that can match the dtype.
//
// Tuned on an H100 80GB HBM3 (132 SMs, 50 MB L2) in bfloat16, where calls of 22 MB to 968 MB reach 1.00 to 1.05 of copy
// speed. Reasons:
//   heads_per_thread      More heads share more of the index arithmetic, but memory is fastest when blocks are short.
//   max_threads           A block takes all heads of a token if they fit: memory is fastest in long contiguous pieces.
//                         A column of two vectors needs more registers, so its blocks are smaller.
//   small_launch          65536 threads are 496 per SM. Smaller launches do not fill the SMs, so they get more and
//                         smaller blocks.
//   side_blocks           The table rows that q has loaded are still in the cache when k needs them.
//   max_interleaved_sequences
//                         A shared table row is still in the cache for the next sequence. Memory is slower the more
//                         places are read at a time, so more sequences are not interleaved.
//   early_trigger_blocks  This few blocks leave room on the SMs for those of the next kernel.
//   prefetch_min_bytes    More than the L2 holds is certain to come from memory. Smaller inputs may be L2-resident,
//                         where the prefetch costs up to 3 % (22 MB). 16 MB fit into the L2 cache of every GPU that has
//                         this prefetch (9.0 and above), so smaller calls do not even query its size.
constexpr LaunchConfig kLaunchTable[] = {
    // One vector per column.
    {/*min_capability=*/0, /*element_bytes=*/0, /*split=*/false,
     /*heads_per_thread=*/2, /*max_threads=*/512, /*min_threads=*/128, /*token_major_threads=*/256,
     /*small_launch=*/65536, /*small_launch_threads=*/64,
     /*side_blocks=*/64, /*max_interleaved_sequences=*/4,
     /*early_trigger_blocks=*/64, /*prefetch_min_bytes=*/int64_t{16} << 20},
    // Two vectors per column.
    {/*min_capability=*/0, /*element_bytes=*/0, /*split=*/true,
     /*heads_per_thread=*/2, /*max_threads=*/256, /*min_threads=*/128, /*token_major_threads=*/256,
     /*small_launch=*/65536, /*small_launch_threads=*/64,
     /*side_blocks=*/64, /*max_interleaved_sequences=*/4,
     /*early_trigger_blocks=*/64, /*prefetch_min_bytes=*/int64_t{16} << 20},
};

// Calls `launch(row)` with the index of the first row that matches, as a std::integral_constant. `capability(row)`
// returns what the kernel of a row was compiled for.
template <int kElementBytes, bool kSplit, int kRow = 0, typename Capability, typename Launch>
void dispatch_launch_config(const Capability& capability, const Launch& launch) {
  static_assert(kRow < static_cast<int>(std::size(kLaunchTable)), "a row for any capability is missing");
  constexpr LaunchConfig kConfig = kLaunchTable[kRow];
  constexpr std::integral_constant<int, kRow> row;
  if constexpr (kConfig.split != kSplit || (kConfig.element_bytes != 0 && kConfig.element_bytes != kElementBytes)) {
    dispatch_launch_config<kElementBytes, kSplit, kRow + 1>(capability, launch);
  } else if constexpr (kConfig.min_capability == 0) {
    launch(row);
  } else if (capability(row) >= kConfig.min_capability) {
    launch(row);
  } else {
    dispatch_launch_config<kElementBytes, kSplit, kRow + 1>(capability, launch);
  }
}

}  // namespace rope3d
