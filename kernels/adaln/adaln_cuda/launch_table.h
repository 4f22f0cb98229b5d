// Launch configurations of adaln. To tune the CUDA kernels for another GPU, edit the tables in this file and nothing
// else.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA, or hold values that the device reports: SMs, shared memory, L2 size.
//
// There is a table for each kernel. The first row that matches is used: put a row for your GPU before the general ones.
// The kernels are compiled for each row, and are empty in the code for capabilities that the row does not name.
//
// Tuned on an H100 80GB HBM3 (capability 9.0, 132 SMs, 227 KB of shared memory a block, 50 MB of L2 cache) in bfloat16,
// with `kernel-builder benchmark kernels/adaln`.
#pragma once

#include <climits>
#include <cstdint>

#include "kit/rows.h"

namespace adaln {

// Capabilities of compiled code, 90 for 9.0: from `first` up to, but not including, `end`.
struct Capabilities {
  int first, end;

  constexpr bool has(int capability) const { return capability >= first && capability < end; }
};

constexpr Capabilities kEveryCapability{0, INT_MAX};
constexpr Capabilities kHopperAndBlackwell{90, 110};  // 9.0 and 10.x

// Sets of dtypes.
constexpr unsigned dtype_bit(kit::Type type) { return 1u << static_cast<int>(type); }
constexpr unsigned kFloat32 = dtype_bit(kit::Type::float32), kBfloat16 = dtype_bit(kit::Type::bfloat16);
constexpr unsigned kFloat16 = dtype_bit(kit::Type::float16), kTwoByteDtypes = kFloat16 | kBfloat16;
constexpr unsigned kEveryDtype = kFloat32 | kTwoByteDtypes;

// Whether a branch is added before the norm, and whether it has a gate.
enum class Branch { none, gated, plain };

// A call that moves more than this fraction of the L2 cache prefetches its input while the preceding kernel still runs.
// Most of a smaller input is still in the cache from the preceding kernel, and the prefetch costs up to 4 % of both
// kernels.
constexpr int kPrefetchL2Divisor = 2;

// Forward, fast path: a row stays in registers. It takes rows of up to max_threads * vectors * 16 bytes. Results are
// written with streaming stores (evict-first).
struct ForwardConfig {
  Capabilities capabilities;  // key
  unsigned dtypes;            // key
  Branch branch;              // key
  // key: the kernel takes at most one factor and one offset, a scale and a shift or a weight and a bias. Their dtype
  // may be another than that of the gate. Such a row goes before the others, except for what these have separate code
  // for.
  bool one_factor;

  int rows;                        // of a thread, 1 or 2
  int vectors;                     // of a thread and row
  int max_threads, blocks_per_sm;  // launch bounds
  int packed_threads;              // of a block that has several groups of short rows
  int64_t prefetch_bytes_per_sm;   // of input, prefetched into L2 ahead of the blocks that read it
  uint32_t prefetch_spans;         // spans whose modulations the first blocks prefetch
};
constexpr ForwardConfig kForwardTable[] = {
    // At copy speed there is time for about ten instructions an element. Two rows share the decoding of modulations.
    {kEveryCapability, kEveryDtype, Branch::none, /*one_factor=*/false, /*rows=*/2, /*vectors=*/2, /*max_threads=*/512,
     /*blocks_per_sm=*/2, /*packed_threads=*/128, /*prefetch_bytes_per_sm=*/32 * 1024, /*prefetch_spans=*/8},
    // x and the branch of one row take the registers of two rows of x.
    {kEveryCapability, kEveryDtype, Branch::gated, /*one_factor=*/false, /*rows=*/1, /*vectors=*/2, /*max_threads=*/512,
     /*blocks_per_sm=*/2, /*packed_threads=*/128, /*prefetch_bytes_per_sm=*/32 * 1024, /*prefetch_spans=*/8},
    // A branch without gate has no other fast path.
    {kEveryCapability, kBfloat16, Branch::plain, /*one_factor=*/true, /*rows=*/1, /*vectors=*/2, /*max_threads=*/512,
     /*blocks_per_sm=*/2, /*packed_threads=*/128, /*prefetch_bytes_per_sm=*/32 * 1024, /*prefetch_spans=*/8},
    // On other capabilities, other dtypes take the general kernel: with more code, the package grows too large.
    {kHopperAndBlackwell, kFloat16 | kFloat32, Branch::plain, /*one_factor=*/true, /*rows=*/1, /*vectors=*/2,
     /*max_threads=*/512, /*blocks_per_sm=*/2, /*packed_threads=*/128, /*prefetch_bytes_per_sm=*/32 * 1024,
     /*prefetch_spans=*/8},
    // Modulations in float32 (Wan), rounding of each step (LTX-Video), and a weight and a bias. On other capabilities
    // and
    // for other dtypes the first two rows take these: with more code, the package grows too large.
    {kHopperAndBlackwell, kBfloat16, Branch::none, /*one_factor=*/true, /*rows=*/2, /*vectors=*/2, /*max_threads=*/512,
     /*blocks_per_sm=*/2, /*packed_threads=*/128, /*prefetch_bytes_per_sm=*/32 * 1024, /*prefetch_spans=*/8},
    {kHopperAndBlackwell, kBfloat16, Branch::gated, /*one_factor=*/true, /*rows=*/1, /*vectors=*/2, /*max_threads=*/512,
     /*blocks_per_sm=*/2, /*packed_threads=*/128, /*prefetch_bytes_per_sm=*/32 * 1024, /*prefetch_spans=*/8},
};

// Forward, general kernel: a row stays in shared memory, or is read again. Results are written with ordinary stores.
struct ForwardGeneralConfig {
  Capabilities capabilities;  // key

  int vectors;                     // of a thread; longer rows have more
  int max_threads, blocks_per_sm;  // launch bounds
};
constexpr ForwardGeneralConfig kForwardGeneralTable[] = {
#if defined(__clang__)
    // 48 registers, as nvcc takes. clang takes 60 if it may: up to 5 % more time for rows of 4097 elements (H100).
    {kEveryCapability, /*vectors=*/4, /*max_threads=*/320, /*blocks_per_sm=*/4},
#else
    {kEveryCapability, /*vectors=*/4, /*max_threads=*/512, /*blocks_per_sm=*/2},
#endif
};

// Backward, fast path: rows pass through a ring buffer in shared memory. One block an SM. It takes rows of up to
// max_threads * vectors * vector_bytes, of which each thread has at least all but one of its vectors. Results are
// written with streaming stores (evict-first).
enum class RowStart { aligned, unaligned };
struct RingKernelConfig {
  Capabilities capabilities;  // key
  unsigned dtypes;            // key
  RowStart start;             // key

  int vector_bytes, vectors;  // of a thread: 8 or 16 bytes; unaligned rows need 16
  int max_threads;            // launch bound
  int stages, max_stages;     // of the ring: one row is processed, the others are in flight
  // A later row of a key is used where it needs fewer than share / of as many threads as the first one; 0: never.
  int share, of;
};
// A branch without gate has kernels of its own for these dtypes, in aligned rows and vectors of 16 bytes. Other rows
// take the kernels for a gated branch: with more code, the package grows too large.
constexpr unsigned kPlainRingDtypes = kBfloat16;
constexpr RingKernelConfig kRingKernelTable[] = {
    {kEveryCapability, kEveryDtype, RowStart::aligned, /*vector_bytes=*/16, /*vectors=*/2, /*max_threads=*/512,
     /*stages=*/2, /*max_stages=*/3, /*share=*/0, /*of=*/1},
    // 12 elements a thread need 4/3 of the threads that 16 need. That pays off where fewer threads are idle.
    {kEveryCapability, kTwoByteDtypes, RowStart::aligned, /*vector_bytes=*/8, /*vectors=*/3, /*max_threads=*/512,
     /*stages=*/2, /*max_stages=*/3, /*share=*/40, /*of=*/33},
    // Other dtypes and capabilities take the general kernel: with more code, the package grows too large.
    {kHopperAndBlackwell, kBfloat16, RowStart::unaligned, /*vector_bytes=*/16, /*vectors=*/2, /*max_threads=*/512,
     /*stages=*/2, /*max_stages=*/3, /*share=*/0, /*of=*/1},
};

// Whether a row of the table has kernels of their own for a branch without gate.
constexpr bool has_plain_ring(const RingKernelConfig& config, unsigned dtype) {
  return config.start == RowStart::aligned && config.vector_bytes == 16 && (kPlainRingDtypes & dtype) != 0;
}

// The number of rows that a block of the ring kernel processes at a time, and the number of stages.
struct RingScheduleConfig {
  Capabilities capabilities;  // key
  unsigned dtypes;            // key
  RowStart start;             // key
  int vector_bytes;           // key: of the kernel
  Branch branch;              // key: of the kernel

  int max_threads;  // of a block with several rows
  // An input is long if an SM reads more bytes than this. Its blocks have long_ring_bytes of rings; or, where
  // long_bytes_in_flight hold rows of at least long_work_bytes, these rows and max_stages (0: never).
  int64_t long_bytes_per_sm;
  int long_ring_bytes, long_bytes_in_flight, long_work_bytes;
  // Other inputs have max_stages, if these fit, and at most few_max_threads where an SM has fewer than few_iterations,
  // or fewest_max_threads where it has fewer than fewest_iterations (0: no such limit).
  int few_iterations, few_max_threads, fewest_iterations, fewest_max_threads;
};
// Reasons:
//   long_bytes_per_sm     In long inputs, blocks drift out of step, and memory is slower the more loads are in flight.
//   long_bytes_in_flight  Rows with a branch are long: it is faster to have fewer of them in deeper rings.
//   few_iterations        384 threads leave registers for a block of the second reduction stage, which then waits on
//                         the SM already. That is worth more than a full block where there are few iterations.
//   fewest_iterations     With 288 threads, some rows are in flight while others are processed.
constexpr RingScheduleConfig kRingScheduleTable[] = {
    {kEveryCapability, kTwoByteDtypes, RowStart::aligned, /*vector_bytes=*/16, Branch::none, /*max_threads=*/512,
     /*long_bytes_per_sm=*/768 * 1024, /*long_ring_bytes=*/76 * 1024, /*long_bytes_in_flight=*/0,
     /*long_work_bytes=*/0, /*few_iterations=*/7, /*few_max_threads=*/384, /*fewest_iterations=*/4,
     /*fewest_max_threads=*/288},
    {kEveryCapability, kTwoByteDtypes, RowStart::aligned, /*vector_bytes=*/16, Branch::gated, /*max_threads=*/384,
     /*long_bytes_per_sm=*/768 * 1024, /*long_ring_bytes=*/76 * 1024, /*long_bytes_in_flight=*/32 * 1024,
     /*long_work_bytes=*/13 * 1024, /*few_iterations=*/7, /*few_max_threads=*/384, /*fewest_iterations=*/4,
     /*fewest_max_threads=*/288},
    {kEveryCapability, kPlainRingDtypes, RowStart::aligned, /*vector_bytes=*/16, Branch::plain, /*max_threads=*/512,
     /*long_bytes_per_sm=*/768 * 1024, /*long_ring_bytes=*/76 * 1024, /*long_bytes_in_flight=*/0,
     /*long_work_bytes=*/0, /*few_iterations=*/7, /*few_max_threads=*/384, /*fewest_iterations=*/4,
     /*fewest_max_threads=*/288},
    // float32, and vectors of 8 bytes: fewer registers a thread, so no limit of threads.
    {kEveryCapability, kEveryDtype, RowStart::aligned, /*vector_bytes=*/16, Branch::none, /*max_threads=*/512,
     /*long_bytes_per_sm=*/768 * 1024, /*long_ring_bytes=*/76 * 1024, /*long_bytes_in_flight=*/0,
     /*long_work_bytes=*/0, /*few_iterations=*/0, /*few_max_threads=*/0, /*fewest_iterations=*/0,
     /*fewest_max_threads=*/0},
    {kEveryCapability, kEveryDtype, RowStart::aligned, /*vector_bytes=*/16, Branch::gated, /*max_threads=*/384,
     /*long_bytes_per_sm=*/768 * 1024, /*long_ring_bytes=*/76 * 1024, /*long_bytes_in_flight=*/32 * 1024,
     /*long_work_bytes=*/13 * 1024, /*few_iterations=*/0, /*few_max_threads=*/0, /*fewest_iterations=*/0,
     /*fewest_max_threads=*/0},
    {kEveryCapability, kEveryDtype, RowStart::aligned, /*vector_bytes=*/8, Branch::none, /*max_threads=*/512,
     /*long_bytes_per_sm=*/768 * 1024, /*long_ring_bytes=*/76 * 1024, /*long_bytes_in_flight=*/0,
     /*long_work_bytes=*/0, /*few_iterations=*/0, /*few_max_threads=*/0, /*fewest_iterations=*/0,
     /*fewest_max_threads=*/0},
    {kEveryCapability, kEveryDtype, RowStart::aligned, /*vector_bytes=*/8, Branch::gated, /*max_threads=*/384,
     /*long_bytes_per_sm=*/768 * 1024, /*long_ring_bytes=*/76 * 1024, /*long_bytes_in_flight=*/32 * 1024,
     /*long_work_bytes=*/13 * 1024, /*few_iterations=*/0, /*few_max_threads=*/0, /*fewest_iterations=*/0,
     /*fewest_max_threads=*/0},
    // Unaligned rows have no deeper rings for long inputs.
    {kEveryCapability, kEveryDtype, RowStart::unaligned, /*vector_bytes=*/16, Branch::none, /*max_threads=*/512,
     /*long_bytes_per_sm=*/768 * 1024, /*long_ring_bytes=*/76 * 1024, /*long_bytes_in_flight=*/0,
     /*long_work_bytes=*/0, /*few_iterations=*/0, /*few_max_threads=*/0, /*fewest_iterations=*/0,
     /*fewest_max_threads=*/0},
    {kEveryCapability, kEveryDtype, RowStart::unaligned, /*vector_bytes=*/16, Branch::gated, /*max_threads=*/384,
     /*long_bytes_per_sm=*/768 * 1024, /*long_ring_bytes=*/76 * 1024, /*long_bytes_in_flight=*/0,
     /*long_work_bytes=*/0, /*few_iterations=*/0, /*few_max_threads=*/0, /*fewest_iterations=*/0,
     /*fewest_max_threads=*/0},
};

// Backward of short rows, of a single row, and of rows with a modulation each. One block an SM, and one vector of
// 8 elements a thread: it takes rows of up to max_threads * 8 elements. Results are written with streaming stores.
struct ShortConfig {
  Capabilities capabilities;  // key
  bool bfloat16_only;         // key: all inputs that are read by rows are bfloat16, a compile-time constant

  int max_threads;  // launch bound
  int stages;       // of a thread's ring: rows that have arrived or are in flight
};
constexpr ShortConfig kShortTable[] = {
    {kEveryCapability, /*bfloat16_only=*/true, /*max_threads=*/512, /*stages=*/4},
    // On other capabilities, other dtypes take the general kernel: with more code, the package grows too large.
    {kHopperAndBlackwell, /*bfloat16_only=*/false, /*max_threads=*/512, /*stages=*/4},
};

// Backward, general kernel. One block an SM. Results are written with streaming stores.
struct BackwardGeneralConfig {
  Capabilities capabilities;  // key

  int max_threads;           // launch bound
  int max_stages;            // of the ring, as many as fit; 3 at most
  int64_t max_vectors;       // of a thread, of a row that stays in shared memory
  int max_piece, min_piece;  // vectors of a piece of a longer row: the largest that fits
};
constexpr BackwardGeneralConfig kBackwardGeneralTable[] = {
    {kEveryCapability, /*max_threads=*/512, /*max_stages=*/3, /*max_vectors=*/64, /*max_piece=*/2048,
     /*min_piece=*/64},
};

// The gate by itself. A thread has one vector of each of its rows. Results are written with ordinary stores.
struct GateConfig {
  Capabilities capabilities;  // key

  int max_columns;                               // threads next to each other in a row
  int threads;                                   // of a block, forward and in the general kernels
  int backward_threads, backward_blocks_per_sm;  // launch bounds
  int backward_rows, general_rows;               // of a thread in flight, backward
};
constexpr GateConfig kGateTable[] = {
    // Backward, few large blocks leave few partial sums. Several rows of a thread keep enough loads in flight.
    {kEveryCapability, /*max_columns=*/256, /*threads=*/256, /*backward_threads=*/640, /*backward_blocks_per_sm=*/1,
     /*backward_rows=*/2, /*general_rows=*/4},
};

// The second stage of sums over rows.
struct ReduceConfig {
  Capabilities capabilities;  // key

  int columns;              // threads next to each other, four columns each
  int few_rows, many_rows;  // rows of threads of a block; many_rows where there are more groups than few_rows
  int batch;                // partial sums of a thread in flight
};
constexpr ReduceConfig kReduceTable[] = {
    // 132 SMs leave up to 132 parts for 16 rows of threads: each thread loads its parts, at most 9, at once.
    {kEveryCapability, /*columns=*/8, /*few_rows=*/16, /*many_rows=*/64, /*batch=*/9},
};

// Returns the first row for a capability that `matches` accepts, or -1.
template <typename Row, int kCount, typename Matches>
constexpr int find_row(const Row (&table)[kCount], int capability, Matches matches) {
  for (int row = 0; row < kCount; ++row) {
    if (table[row].capabilities.has(capability) && matches(table[row])) return row;
  }
  return -1;
}
template <typename Row, int kCount>
constexpr int find_row(const Row (&table)[kCount], int capability) {
  return find_row(table, capability, [](const Row&) { return true; });
}

// Other kernels take what the ring and short kernels have no row for.
constexpr bool is_complete(int capability) {
  return find_row(kForwardGeneralTable, capability) >= 0 && find_row(kBackwardGeneralTable, capability) >= 0 &&
         find_row(kGateTable, capability) >= 0 && find_row(kReduceTable, capability) >= 0;
}
static_assert(is_complete(0) && is_complete(INT_MAX - 1), "these tables need a row for every capability");

}  // namespace adaln
