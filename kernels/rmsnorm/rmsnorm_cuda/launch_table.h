// The launch configurations of rmsnorm's CUDA kernels: the one file to edit when tuning for another GPU.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// Widths are in 16-byte vectors, or in elements where rows are not read in vectors. The kernels are instantiated from
// these rows; static assertions below reject values that the kernels cannot run.
//
// All rows were tuned on an H100 SXM (capability 9.0, 132 SMs, 50 MB of L2 cache). Results are right on all GPUs;
// the speed was measured on that one only, except where a row says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kit/launch_table.h"

namespace rmsnorm {

// --- forward

enum class ForwardLayout : unsigned {
  fast = 1,     // fast path (see FastForwardArguments), aligned rows
  aligned = 2,  // aligned rows, not the fast path
  general = 4,  // calls that no other row takes; widths are in elements if the rows are not aligned
};
enum class Reads : unsigned { many = 8, other = 16 };  // many: no residual, and a call of at least kManyBytesPerSm
constexpr int64_t kManyBytesPerSm = 120 << 10;         // read and written
constexpr int64_t kBlockWidth = 4096;                  // of the rows that one block can hold, in vectors
// Rows of up to this many vectors pass through the ring buffer only if there is one per SM, and with a residual only if
// the blocks of all rows run at once.
constexpr int64_t kRegisterWidth = 3072;
constexpr int64_t kRingWarpsPerSm = 16;  // for which an SM has the ring kernel's registers

struct ForwardLaunch : kit::LaunchKey<ForwardLaunch> {
  LAUNCH_FIELD(bool, row_per_block, true)  // else a block has several rows, each read by up to 32 lanes
  LAUNCH_FIELD(int, threads, 1024)         // per block; with row_per_block the most
  LAUNCH_FIELD(int, min_threads, 32)       // per row, or the vectors of the row if they are fewer
  LAUNCH_FIELD(int, vectors, 4)            // per thread: a row gets as many threads as this needs
  LAUNCH_FIELD(int, held, 4)               // vectors per thread that the kernel has registers for, at least `vectors`
  // Rows of each cluster of the ring kernel beyond the first ones that an SM has; 0: not that kernel.
  LAUNCH_FIELD(int, next_rows, 0)

  // Cache policy; the general kernel does not prefetch and triggers after its grid wait. A call that moves more bytes
  // than l2_multiple times the L2 cache uses normal stores, and all blocks prefetch. Other calls store evict-first, so
  // that their inputs stay L2-resident, and only the first prefetch_blocks_per_sm of each SM prefetch: later ones find
  // the memory busy, and where x is L2-resident the second request costs time. In the first case, without a residual, a
  // block prefetches this many bytes per SM ahead of its own reads; with a residual, and in the second case, it
  // prefetches its own reads. Measured: with 16 KB, aligned rows are slower on an H200, and with 32 KB on an
  // H100.
  LAUNCH_FIELD(int, l2_multiple, 2)
  LAUNCH_FIELD(int64_t, prefetch_bytes_per_sm, 24 << 10)
  LAUNCH_FIELD(int, prefetch_blocks_per_sm, 4)
  // PDL: grids of at least this many blocks trigger the next grid when they start, smaller ones after their grid wait.
  // If several smaller grids in a row triggered early, their blocks would wait at the same time and crowd some SMs.
  LAUNCH_FIELD(unsigned, early_trigger_blocks, 1024)
};

// Short rows share a block. The number of threads per row balances two effects: with too many rows at a time on an SM,
// concurrent accesses are too far apart in memory; with too few, the memory is not kept busy.
constexpr ForwardLaunch kShortRows = ForwardLaunch().with_row_per_block(false).with_threads(128).with_min_threads(4);
constexpr ForwardLaunch kFast = ForwardLaunch().for_variants(ForwardLayout::fast);

constexpr ForwardLaunch kForwardLaunches[] = {
    // Rows of up to 64 vectors are 1 to 3 % faster with two vectors per thread than with four on an H100, and 5 to 7 %
    // on an H200.
    kShortRows.for_variants(ForwardLayout::fast).for_widths(1, 64).with_vectors(2).with_held(2),
    kShortRows.for_variants(ForwardLayout::fast).for_widths(65, 128),
    kShortRows.for_variants(ForwardLayout::aligned).for_widths(1, 64).with_vectors(2).with_held(2),
    kShortRows.for_variants(ForwardLayout::aligned).for_widths(65, 128),
    // A block per row: two vectors per thread while 512 threads can hold a row, else four. Many reads without a
    // residual take up to 9 % less time with four from 448 vectors on (H200): more vectors are in flight on an SM.
    kFast.for_variants(ForwardLayout::fast, Reads::many).for_widths(448, 1024).with_threads(256),
    kFast.for_widths(129, 1024).with_threads(512).with_vectors(2).with_held(2),
    // Rows that pass through the ring buffer, while the memory is busy with the next ones: 512 rows of 32,768 bfloat16
    // elements take 16 % less time than in registers of clusters (H200).
    kFast.for_capabilities({90, 100})
        .for_widths(2049, 16384)
        .with_threads(512)
        .with_vectors(8)
        .with_held(8)
        .with_next_rows(2)
        .with_l2_multiple(0),
    // Few blocks fit on an SM. Prefetching ahead keeps the memory busy while they reduce their rows.
    kFast.for_widths(1025, kBlockWidth).with_l2_multiple(1),
    // The general kernel loops over a row and holds nothing.
    kShortRows.for_variants(ForwardLayout::general).for_widths(0, 256).with_min_threads(1).with_vectors(1),
    ForwardLaunch().for_variants(ForwardLayout::general).for_widths(257, kit::kAnyWidth),
};

// Returns the number of threads that a row of `width` vectors gets.
constexpr int64_t threads_of_row(const ForwardLaunch& launch, int64_t width) {
  const int64_t most = launch.row_per_block ? launch.threads : 32;
  const int64_t held = width < most * launch.vectors ? width : most * launch.vectors;
  const int64_t wanted = (held + launch.vectors - 1) / launch.vectors;
  const int64_t least = width < launch.min_threads ? width : launch.min_threads;
  return wanted > least ? wanted : least;
}

// Returns the logarithm of the lanes that share a row, where a block has several rows: a power of two.
constexpr int log2_lanes(const ForwardLaunch& launch, int64_t width) {
  int log2 = 0;
  while (int64_t{1} << log2 < threads_of_row(launch, width)) ++log2;
  return log2;
}

// Returns log2_lanes for the fast path if it is the same for all widths of a row of the table, else -1. On the other
// path a constant costs registers.
constexpr int fixed_log2_lanes(const ForwardLaunch& launch) {
  if (launch.row_per_block || !launch.is(ForwardLayout::fast)) return -1;
  const int log2 = log2_lanes(launch, launch.widths.first);
  return log2 == log2_lanes(launch, launch.widths.last) ? log2 : -1;
}

// --- backward

// `units` are vectors. Rows that are not aligned take the general kernel.
struct BackwardLaunch : kit::LaunchKey<BackwardLaunch> {
  LAUNCH_FIELD(bool, general, false)
  LAUNCH_FIELD(int, threads, 512)         // the most per block
  LAUNCH_FIELD(int, threads_per_sm, 512)  // at most, in one to three blocks

  // The general kernel uses none of the following.
  LAUNCH_FIELD(int, min_threads, 1)           // per row, or the units of the row if they are fewer
  LAUNCH_FIELD(int, single_row_threads, 256)  // min_threads when there is only one row
  LAUNCH_FIELD(int, units, 4)                 // per thread and tensor: a row gets as many threads as this needs
  LAUNCH_FIELD(int, held, 4)                  // units that the kernel has room for, at least `units`
  LAUNCH_FIELD(int, stages, 2)                // of the ring buffer of a row's threads
  LAUNCH_FIELD(int, single_block_rows, 8)     // up to this many rows run in one block: no second kernel
  LAUNCH_FIELD(int, many_iterations, 8)  // PDL: blocks with more trigger before their last two, others before the last
};

constexpr BackwardLaunch kBackwardLaunches[] = {
    // Two stages: with more, memory is read too far ahead, which is slower. 512 threads per SM, in two blocks where two
    // have room, so that one works while the other starts or ends. Rows whose ring does not fit in shared memory fall
    // through to the general kernel. In short rows a thread takes two vectors only, so that a load covers more of a
    // cache line.
    BackwardLaunch().for_widths(0, 32).with_units(2).with_held(2),
    BackwardLaunch().for_widths(33, 2048),
    // Longer rows are read twice, by one block per SM.
    BackwardLaunch().with_general(true).with_threads(1024).with_threads_per_sm(1024),
};

// The second stage of the weight gradient's reduction. A block has `across` x `down` threads: `across` of them hold the
// columns of the block, four each, and every `down`th part goes to the same thread. The first row is used whose threads
// load all their parts at once, or else the last.
struct ReduceLaunch : kit::LaunchKey<ReduceLaunch> {
  LAUNCH_FIELD(int, across, 8)
  LAUNCH_FIELD(int, down, 16)
  LAUNCH_FIELD(int, batch, 9)  // parts that a thread loads at a time
};

constexpr ReduceLaunch kReduceLaunches[] = {
    // Most of the time is launch latency, so a thread loads all its parts at once: 144, which are enough for one block
    // per SM of an H100, or 288 for two. Smaller blocks have room on an SM beside a block of the first stage, and start
    // before it ends: 256 rows of 16384 are 3 % (H200) to 5 % (H100) faster in both passes than with the second row.
    ReduceLaunch(),
    ReduceLaunch().with_down(32),
};

constexpr bool is_general(const BackwardLaunch& row) { return row.general; }

static_assert(kit::serves_all(kForwardLaunches, ForwardLayout::general), "a width has no row");
static_assert(kit::serves_all(kBackwardLaunches, {}, is_general), "a width has no row");

}  // namespace rmsnorm
