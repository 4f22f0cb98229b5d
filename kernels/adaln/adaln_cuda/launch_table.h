// Launch configurations of adaln. To tune the CUDA kernels for another GPU, edit the tables and constants in this file
// and nothing else.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA, or hold values that the device reports: SMs, shared memory, L2 size.
//
// There is a table for each fast path. Its kernels are compiled for each row, and are empty in the code for
// capabilities that the row does not name. The other kernels have constants.
//
// Tuned on an H100 80GB HBM3 (capability 9.0, 132 SMs, 227 KB of shared memory a block, 50 MB of L2 cache) in bfloat16,
// with `kernel-builder benchmark kernels/adaln`.
#pragma once

#include <cstdint>

#include "kit/launch_table.h"

namespace adaln {

using kit::kBfloat16, kit::kFloat16, kit::kFloat32, kit::kHopperAndBlackwell, kit::kTwoByteDtypes;

// Whether a branch is added before the norm, and whether it has a gate.
enum class Branch : unsigned { none = 1, gated = 2, plain = 4 };

// A call that moves more than this fraction of the L2 cache prefetches its input while the preceding kernel still runs.
// Most of a smaller input is still in the cache from the preceding kernel, and the prefetch costs up to 4 % of both
// kernels.
constexpr int kPrefetchL2Divisor = 2;

// Forward, fast path: a row stays in registers. It takes rows of up to max_threads * vectors * 16 bytes; widths are in
// such vectors. Results are written with streaming stores (evict-first).
//
// With FactorCount::one, the kernel takes at most one factor and one offset, a scale and a shift or a weight and a
// bias. Their dtype may be another than that of the gate. Such a row goes before the others, except for calls for which
// these have separate code for.
enum class FactorCount : unsigned { any = 8, one = 16 };
struct ForwardConfig : kit::LaunchKey<ForwardConfig> {
  LAUNCH_FIELD(int, rows, 1)           // of a thread, 1 or 2
  LAUNCH_FIELD(int, vectors, 2)        // of a thread and row
  LAUNCH_FIELD(int, max_threads, 512)  // launch bounds
  LAUNCH_FIELD(int, blocks_per_sm, 2)
  LAUNCH_FIELD(int, packed_threads, 128)                   // of a block that has several groups of short rows
  LAUNCH_FIELD(int64_t, prefetch_bytes_per_sm, 32 * 1024)  // of input, prefetched ahead of the blocks that read it
  LAUNCH_FIELD(uint32_t, prefetch_spans, 8)                // spans whose modulations the first blocks prefetch
};
constexpr ForwardConfig kWideForward = ForwardConfig().for_dtypes(kFloat32).for_widths(1025, 2048).with_vectors(4);
constexpr ForwardConfig kBfloat16Forward = ForwardConfig().for_dtypes(kBfloat16).for_capabilities(kHopperAndBlackwell);
constexpr ForwardConfig kForwardTable[] = {
    // Wide float32 rows have as many bytes as 16-bit rows of twice the width: twice the vectors a thread.
    kWideForward.for_variants(Branch::none, FactorCount::any),
    kWideForward.for_variants(Branch::gated, FactorCount::any).with_blocks_per_sm(1),
    kWideForward.for_variants(Branch::plain, FactorCount::one).with_blocks_per_sm(1),
    // At copy speed there is time for about ten instructions an element. Two rows share the decoding of modulations.
    ForwardConfig().for_variants(Branch::none, FactorCount::any).with_rows(2),
    // x and the branch of one row take the registers of two rows of x.
    ForwardConfig().for_variants(Branch::gated, FactorCount::any),
    // A branch without gate has no other fast path.
    ForwardConfig().for_variants(Branch::plain, FactorCount::one),
    // Modulations in float32 (Wan), rounding of each step (LTX-Video), and a weight and a bias. On other capabilities
    // and for other dtypes the first two rows take these: with more code, the package grows too large.
    kBfloat16Forward.for_variants(Branch::none, FactorCount::one).with_rows(2),
    kBfloat16Forward.for_variants(Branch::gated, FactorCount::one),
};

// Backward, fast path: rows pass through a ring buffer in shared memory. One block an SM. It takes rows of up to
// max_threads * vectors * vector_bytes, of which each thread has at least all but one of its vectors. Widths are in
// vectors of 16 bytes. Results are written with streaming stores (evict-first).
struct RingKernelConfig : kit::LaunchKey<RingKernelConfig> {
  LAUNCH_FIELD(int, vector_bytes, 16)  // 8 or 16
  LAUNCH_FIELD(int, vectors, 2)        // of a thread
  LAUNCH_FIELD(int, max_threads, 512)  // launch bound
  LAUNCH_FIELD(int, stages, 2)         // of the ring, up to max_stages: one row is processed, the others are in flight
  LAUNCH_FIELD(int, max_stages, 3)
  // A later row for a call is used where it needs fewer than share / of as many threads as the first one; 0: never.
  LAUNCH_FIELD(int, share, 0)
  LAUNCH_FIELD(int, of, 1)
};
// A branch without gate has kernels of its own for these dtypes, in vectors of 16 bytes. Other rows take the kernels
// for a gated branch: with more code, the package grows too large.
constexpr unsigned kPlainRingDtypes = kBfloat16;
constexpr RingKernelConfig kRingKernelTable[] = {
    // Wide float32 rows, with as many elements a thread as 16-bit rows have.
    RingKernelConfig().for_dtypes(kFloat32).for_widths(1025, 2048).with_vectors(4),
    RingKernelConfig(),
    // 12 elements a thread need 4/3 of the threads that 16 need. That pays off where fewer threads are idle.
    RingKernelConfig().for_dtypes(kTwoByteDtypes).with_vector_bytes(8).with_vectors(3).with_share(40).with_of(33),
};

// Whether a row of the table has kernels of their own for a branch without gate.
constexpr bool has_plain_ring(const RingKernelConfig& config, unsigned dtype) {
  return config.vector_bytes == 16 && (kPlainRingDtypes & dtype) != 0;
}

// The number of rows that a block of the ring kernel processes at a time, and the number of stages. The branch is that
// of the kernel.
struct RingScheduleConfig : kit::LaunchKey<RingScheduleConfig> {
  LAUNCH_FIELD(int, vector_bytes, 0)  // of the kernel, 0: any; part of the key

  LAUNCH_FIELD(int, max_threads, 512)  // of a block with several rows
  // An input is long if an SM reads more bytes than this. Its blocks have long_ring_bytes of rings; or, where
  // long_bytes_in_flight hold rows of at least long_work_bytes, these rows and max_stages (0: never).
  LAUNCH_FIELD(int64_t, long_bytes_per_sm, 768 * 1024)
  LAUNCH_FIELD(int, long_ring_bytes, 76 * 1024)
  LAUNCH_FIELD(int, long_bytes_in_flight, 0)
  LAUNCH_FIELD(int, long_work_bytes, 13 * 1024)
  // Other inputs have max_stages, if these fit, and at most few_max_threads where an SM has fewer than few_iterations,
  // or fewest_max_threads where it has fewer than fewest_iterations (0: no such limit).
  LAUNCH_FIELD(int, few_iterations, 0)
  LAUNCH_FIELD(int, few_max_threads, 384)
  LAUNCH_FIELD(int, fewest_iterations, 0)
  LAUNCH_FIELD(int, fewest_max_threads, 288)
};
// Reasons:
//   long_bytes_per_sm     In long inputs, blocks drift out of step, and memory is slower the more loads are in flight.
//   long_bytes_in_flight  Rows with a branch are long: it is faster to have fewer of them in deeper rings.
//   few_iterations        384 threads leave registers for a block of the second reduction stage, which then waits on
//                         the SM already. That is worth more than a full block where there are few iterations. float32
//                         and vectors of 8 bytes take fewer registers a thread, so they need no limit.
//   fewest_iterations     With 288 threads, some rows are in flight while others are processed.
constexpr RingScheduleConfig kGatedRingSchedule =
    RingScheduleConfig().for_variants(Branch::gated).with_max_threads(384).with_long_bytes_in_flight(32 * 1024);
constexpr RingScheduleConfig limit_few_iterations(RingScheduleConfig schedule) {
  return schedule.for_dtypes(kTwoByteDtypes).with_vector_bytes(16).with_few_iterations(7).with_fewest_iterations(4);
}
constexpr RingScheduleConfig kRingScheduleTable[] = {
    limit_few_iterations(kGatedRingSchedule),
    limit_few_iterations(RingScheduleConfig()),
    kGatedRingSchedule,
    RingScheduleConfig(),
};

// Backward of short rows, of a single row, and of rows with a modulation each. One block an SM, and one vector of
// 8 elements a thread: it takes rows of up to kShortThreads * 8 elements. Results are written with streaming stores.
constexpr int kShortThreads = 512;  // launch bound
constexpr int kShortStages = 4;     // of a thread's ring: rows that have arrived or are in flight

// The gate by itself. A thread has one vector of each of its rows. Results are written with ordinary stores. Backward,
// few large blocks leave few partial sums, and several rows of a thread keep enough loads in flight.
constexpr int kGateColumns = 256;                                        // threads next to each other in a row, at most
constexpr int kGateThreads = 256;                                        // of a block, forward
constexpr int kGateBackwardThreads = 640, kGateBackwardBlocksPerSm = 1;  // launch bounds
constexpr int kGateBackwardRows = 2;                                     // of a thread in flight

// The second stage of sums over rows. Each thread loads its parts at once, if there are at most 144 parts; where SMs
// leave more, a block has more rows of threads.
constexpr int kReduceAcross = 8;     // threads next to each other, four columns each
constexpr int kReduceFewRows = 16;   // rows of threads of a block
constexpr int kReduceManyRows = 64;  // where there are more groups than kReduceFewRows
constexpr int kReduceBatch = 9;      // partial sums of a thread in flight

}  // namespace adaln
