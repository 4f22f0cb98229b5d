// The launch configurations of rmsnorm's CUDA kernels: the one file to edit when tuning for another GPU.
//
// Each table is searched from the top; the first row that matches the call is used. The columns to match:
//   capability   lowest compute capability of the device, as 10 * major + minor; 0: all. Rows for a newer GPU go
//                before the others.
//   bytes        bytes of an element of x: 2 or 4; 0: both.
//   layout       how rows are stored in memory.
//   widths       first and last row length, in 16-byte vectors, or in elements where rows are not read in vectors.
// The kernels are instantiated from these rows; static assertions below reject values that the kernels cannot run.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// All rows were tuned on an H100 SXM (capability 9.0, 132 SMs, 50 MB of L2 cache). Results are right on all GPUs;
// the speed was measured on that one only, except where a row says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>

namespace rmsnorm {

constexpr int kH100Sms = 132;
constexpr int64_t kAnyWidth = std::numeric_limits<int64_t>::max();

// --- forward

enum class ForwardLayout {
  fast,            // fast path (see FastForwardArguments), aligned rows
  fast_unaligned,  // fast path, unaligned rows with the same misalignment in all tensors
  aligned,         // aligned rows, not the fast path
  general,         // calls that no other row takes; widths are in elements if the rows are not aligned
};

enum class ForwardKernel { aligned, unaligned, general };

struct ForwardLaunch {
  int capability, bytes;
  ForwardLayout layout;
  int64_t min_width, max_width;
  ForwardKernel kernel;
  bool row_per_block;  // else a block has several rows, each read by up to 32 lanes
  int threads;         // per block; with row_per_block the most
  int min_threads;     // per row, or the vectors of the row if they are fewer
  int vectors;         // per thread: a row gets as many threads as this needs
  int held;            // vectors per thread that the kernel has registers for, at least `vectors`
  // Cache policy. A call that moves more bytes than l2_multiple times the L2 cache uses normal stores, and all blocks
  // prefetch. Other calls store evict-first, so that their inputs stay L2-resident, and blocks from prefetch_blocks on
  // do not prefetch. In the first case, without a residual, a block prefetches this many bytes per SM ahead of what it
  // reads; with a residual, and in the second case, it prefetches what it reads itself.
  int l2_multiple;
  int64_t prefetch_bytes_per_sm;
  unsigned prefetch_blocks;
  // PDL: grids of at least this many blocks trigger the next grid when they start, smaller ones after their grid wait.
  unsigned early_trigger_blocks;
};

// The first four blocks of each SM prefetch. Later ones find the memory busy, and where x is L2-resident the second
// request costs time.
constexpr unsigned kPrefetchBlocks = 4 * kH100Sms;
// Measured: with 16 KB, aligned rows are slower on an H200, and with 32 KB on an H100.
constexpr int64_t kPrefetchBytes = 24 << 10, kUnalignedPrefetchBytes = 16 << 10;
// If several smaller grids in a row triggered early, their blocks would wait at the same time and crowd some SMs.
constexpr unsigned kEarlyTriggerBlocks = 1024;

// clang-format off
constexpr ForwardLaunch kForwardLaunches[] = {
    // capability, bytes, layout,          widths,       kernel,                   row per  threads, min.     vectors, held, L2, prefetch bytes,          prefetch         early
    //                                                                             block             threads                        per SM                   blocks           trigger

    // Short rows share a block. The number of threads per row balances two effects: with too many rows at a time on an
    // SM, concurrent accesses are too far apart in memory; with too few, the memory is not kept busy. Rows of up to 64
    // vectors are 1 to 3 % faster with two vectors per thread than with four on an H100, and 5 to 7 % on an H200.
    {0, 0, ForwardLayout::fast,              1,        64, ForwardKernel::aligned,   false,   128,     4,       2,       2,    2,  kPrefetchBytes,          kPrefetchBlocks, kEarlyTriggerBlocks},
    {0, 0, ForwardLayout::fast,             65,       128, ForwardKernel::aligned,   false,   128,     4,       4,       4,    2,  kPrefetchBytes,          kPrefetchBlocks, kEarlyTriggerBlocks},
    {0, 0, ForwardLayout::aligned,           1,        64, ForwardKernel::aligned,   false,   128,     4,       2,       2,    2,  kPrefetchBytes,          kPrefetchBlocks, kEarlyTriggerBlocks},
    {0, 0, ForwardLayout::aligned,          65,       128, ForwardKernel::aligned,   false,   128,     4,       4,       4,    2,  kPrefetchBytes,          kPrefetchBlocks, kEarlyTriggerBlocks},
    // A block per row: two vectors per thread while 512 threads can hold a row, else four.
    {0, 0, ForwardLayout::fast,            129,      1024, ForwardKernel::aligned,   true,    512,     32,      2,       2,    2,  kPrefetchBytes,          kPrefetchBlocks, kEarlyTriggerBlocks},
    {0, 0, ForwardLayout::fast,           1025,      4096, ForwardKernel::aligned,   true,    1024,    32,      4,       4,    2,  kPrefetchBytes,          kPrefetchBlocks, kEarlyTriggerBlocks},
    // In short unaligned rows a thread takes two vectors: a block of one or two warps has too few loads in flight.
    {0, 0, ForwardLayout::fast_unaligned,   33,       256, ForwardKernel::unaligned, true,    512,     64,      2,       4,    2,  kUnalignedPrefetchBytes, kPrefetchBlocks, kEarlyTriggerBlocks},
    {0, 0, ForwardLayout::fast_unaligned,  257,      2048, ForwardKernel::unaligned, true,    512,     64,      4,       4,    2,  kUnalignedPrefetchBytes, kPrefetchBlocks, kEarlyTriggerBlocks},
    // The general kernel loops over a row and holds nothing. It does not prefetch and triggers after its grid wait.
    {0, 0, ForwardLayout::general,           0,       256, ForwardKernel::general,   false,   128,     1,       1,       0,    2,  0,                       0,               0},
    {0, 0, ForwardLayout::general,         257, kAnyWidth, ForwardKernel::general,   true,    1024,    32,      4,       0,    2,  0,                       0,               0},
};
// clang-format on

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
  if (launch.row_per_block || launch.layout != ForwardLayout::fast) return -1;
  const int log2 = log2_lanes(launch, launch.min_width);
  return log2 == log2_lanes(launch, launch.max_width) ? log2 : -1;
}

// --- backward

enum class BackwardLayout {
  vectors,   // rows that can be read in vectors, aligned or not; widths count whole vectors
  elements,  // other rows
};

enum class BackwardKernel { ring, scalar, general };

// `units` are vectors or elements, as the layout says.
struct BackwardLaunch {
  int capability, bytes;
  BackwardLayout layout;
  int64_t min_width, max_width;
  BackwardKernel kernel;
  int threads;             // the most per block
  int threads_per_sm;      // at most, in one to three blocks
  int min_threads;         // per row, or the units of the row if they are fewer
  int single_row_threads;  // min_threads when there is only one row
  int units;               // per thread and tensor: a row gets as many threads as this needs
  int held;                // units per thread and tensor that the kernel has room for, at least `units`
  int stages;              // of the ring buffer of a row's threads; 0: the kernel has none
  int single_block_rows;   // up to this many aligned rows run in one block, which saves the second kernel
  int many_iterations;     // PDL: blocks with more iterations trigger before their last two, others before the last
  int rows_per_sm;         // unaligned rows are read in vectors if there are more rows per SM than this
};

// clang-format off
constexpr BackwardLaunch kBackwardLaunches[] = {
    // capability, bytes, layout,        widths,       kernel,                  threads, threads min.     single row units, held, stages, single     many        rows
    //                                                                                   per SM  threads  threads                          block rows iterations  per SM

    // Two stages: with more, memory is read too far ahead, which is slower. 512 threads per SM, in two blocks where two
    // have room, so that one works while the other starts or ends. With one row per SM, the ring kernel's preparation
    // for unaligned rows takes longer than it saves. Rows whose ring does not fit in shared memory fall through to the
    // general kernel. In short rows a thread takes two vectors only, so that a load covers more of a cache line.
    {0, 0, BackwardLayout::vectors,     0,        32, BackwardKernel::ring,     512,     512,    1,       256,       2,     2,    2,      8,         8,          1},
    {0, 0, BackwardLayout::vectors,    33,      2048, BackwardKernel::ring,     512,     512,    1,       256,       4,     4,    2,      8,         8,          1},
    // Rows that are read element by element. A whole warp reads a row, instead of a few threads with many elements
    // each.
    {0, 0, BackwardLayout::elements,    1,      1024, BackwardKernel::scalar,   512,     512,    32,      32,        2,     2,    0,      8,         0,          0},
    // Longer rows are read twice, by one block per SM.
    {0, 0, BackwardLayout::vectors,     0, kAnyWidth, BackwardKernel::general,  1024,    1024,   1024,    1024,      1,     0,    0,      0,         0,          0},
    {0, 0, BackwardLayout::elements,    0, kAnyWidth, BackwardKernel::general,  1024,    1024,   1024,    1024,      1,     0,    0,      0,         0,          0},
};
// clang-format on

// The second stage of the weight gradient's reduction. A block has `across` x `down` threads: `across` of them hold the
// columns of the block, four each, and every `down`th part goes to the same thread.
struct ReduceLaunch {
  int capability;
  int64_t max_parts;
  int across, down;
  int batch;  // parts that a thread loads at a time
};

constexpr ReduceLaunch kReduceLaunches[] = {
    // Most of the time is launch latency, so a thread loads all its parts at once: those of one block per SM, or of
    // two. Smaller blocks have room on an SM beside a block of the first stage, and start before it ends: 256 rows of
    // 16384 are 3 % (H200) to 5 % (H100) faster in both passes than with the second row.
    {0, kH100Sms, 8, 16, (kH100Sms + 15) / 16},
    {0, kAnyWidth, 8, 32, (2 * kH100Sms + 31) / 32},
};

// --- lookup

// Returns the index of the first row, from `begin` on, that matches; -1 if there is none.
template <typename Launch, size_t kRows, typename Layout>
constexpr int find_launch(const Launch (&table)[kRows], int capability, int bytes, Layout layout, int64_t width,
                          int begin = 0) {
  for (int i = begin; i < static_cast<int>(kRows); ++i) {
    const Launch& row = table[i];
    if (row.capability <= capability && (row.bytes == 0 || row.bytes == bytes) && row.layout == layout &&
        row.min_width <= width && width <= row.max_width) {
      return i;
    }
  }
  return -1;
}

constexpr int find_reduce_launch(int capability, int64_t parts) {
  int i = 0;
  while (kReduceLaunches[i].capability > capability || kReduceLaunches[i].max_parts < parts) ++i;
  return i;
}

// --- requirements of the kernels on the rows

constexpr bool can_run(const ForwardLaunch& row) {
  const bool block = row.threads >= 128 && row.threads <= 1024 && row.threads % 128 == 0 && row.vectors > 0;
  if (row.kernel == ForwardKernel::general) return block && row.layout == ForwardLayout::general;
  // Registers hold a row; the threads of an unaligned row's head and tail are 16.
  const int64_t threads = row.row_per_block ? row.threads : 32;
  const bool unaligned = row.layout == ForwardLayout::fast_unaligned;
  return block && row.vectors <= row.held && row.max_width <= threads * row.vectors &&
         row.layout != ForwardLayout::general &&
         (row.layout == ForwardLayout::fast_unaligned) == (row.kernel == ForwardKernel::unaligned) &&
         (!unaligned || (row.row_per_block && row.min_threads >= 16)) &&
         (row.layout != ForwardLayout::aligned || !row.row_per_block);
}

constexpr bool can_run(const BackwardLaunch& row) {
  const bool block =
      row.threads >= 32 && row.threads <= 1024 && row.threads % 32 == 0 && row.units > 0 && row.threads_per_sm > 0;
  if (row.kernel == BackwardKernel::general) return block && row.threads == 1024;
  return block && row.units <= row.held && row.max_width <= int64_t{row.threads} * row.units &&
         (row.layout == BackwardLayout::vectors) == (row.kernel == BackwardKernel::ring) &&
         (row.kernel == BackwardKernel::ring) == (row.stages > 0);
}

constexpr bool can_run(const ReduceLaunch& row) {
  return row.across > 0 && row.across <= 32 && 32 % row.across == 0 && row.down * row.across % 32 == 0 &&
         row.down * row.across >= 4 * row.across && row.down * row.across <= 1024 && row.batch > 0;
}

template <typename Launch, size_t kRows>
constexpr bool can_run(const Launch (&table)[kRows]) {
  for (const Launch& row : table) {
    if (!can_run(row)) return false;
  }
  return true;
}

// Returns whether the rows of the general kernel take all widths on all devices. They are in order of their widths.
template <typename Launch, size_t kRows, typename Layout, typename Kernel>
constexpr bool covers_all(const Launch (&table)[kRows], Layout layout, Kernel general) {
  int64_t next = 0;
  for (const Launch& row : table) {
    if (row.kernel != general || row.layout != layout || row.capability != 0 || row.bytes != 0) continue;
    if (row.min_width <= next && row.max_width == kAnyWidth) return true;
    if (row.min_width <= next) next = row.max_width + 1;
  }
  return false;
}

static_assert(covers_all(kForwardLaunches, ForwardLayout::general, ForwardKernel::general), "a width has no row");
static_assert(covers_all(kBackwardLaunches, BackwardLayout::vectors, BackwardKernel::general), "a width has no row");
static_assert(covers_all(kBackwardLaunches, BackwardLayout::elements, BackwardKernel::general), "a width has no row");
static_assert(kReduceLaunches[std::size(kReduceLaunches) - 1].capability == 0 &&
                  kReduceLaunches[std::size(kReduceLaunches) - 1].max_parts == kAnyWidth,
              "the last row is for all devices and any number of parts");
static_assert(can_run(kForwardLaunches), "a row of kForwardLaunches breaks what its kernel requires");
static_assert(can_run(kBackwardLaunches), "a row of kBackwardLaunches breaks what its kernel requires");
static_assert(can_run(kReduceLaunches), "a row of kReduceLaunches breaks what its kernel requires");

}  // namespace rmsnorm
