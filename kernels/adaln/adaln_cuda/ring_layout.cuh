// Selects the launch configuration of the ring kernel for a problem, and launches it.
//
// Reads:    attributes of the current device.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Included by backward.cu.
#pragma once

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "adaln_cuda/backward_ring.cuh"

namespace adaln {
namespace {

// The mapping of rows to blocks.
struct RingLayout {
  int row;          // of kRingKernelTable
  int group, rows;  // threads of a row; rows of a block. No rows: the kernel does not take the problem.
  int stages;
  size_t shared_bytes;  // of a block
};

// Threads of a row for a row of the table, or 0 when the kernel does not take such rows: each thread has at least all
// but one of its vectors.
int ring_threads(const RingKernelConfig& config, int64_t hidden, int64_t element) {
  const int64_t width = config.vector_bytes / element;
  const int64_t warp_vectors = config.vectors * kWarp;
  const auto threads = static_cast<int>((hidden / width + warp_vectors - 1) / warp_vectors * kWarp);
  const bool fits = hidden <= config.vectors * width * config.max_threads;
  return fits && hidden / width >= (config.vectors - 1) * threads ? threads : 0;
}

// The branch of the kernel that takes a problem.
Branch kernel_branch(const Backward& problem) {
  if (problem.grad_branch != nullptr) return Branch::gated;
  if (problem.grad_sum.data == nullptr) return Branch::none;
  return (kPlainRingDtypes & dtype_bit(problem.type)) != 0 ? Branch::plain : Branch::gated;
}

// Selects a kernel and the threads of a row. Returns false when no kernel takes the problem.
bool select_ring_kernel(const Backward& problem, RingLayout* layout) {
  const int64_t element = bytes_of(problem.type);
  if (problem.hidden % (kVectorBytes / element) != 0) return false;
  const bool plain = kernel_branch(problem) == Branch::plain;
  int first_threads = 0;
  const LaunchCall call{compiled_capability(), problem.type, {}, problem.hidden / (kVectorBytes / element)};
  for (int row = 0; row < static_cast<int>(std::size(kRingKernelTable)); ++row) {
    const RingKernelConfig& config = kRingKernelTable[row];
    if (!config.serves(call) || (plain && config.vector_bytes != kVectorBytes)) continue;
    const int threads = ring_threads(config, problem.hidden, element);
    if (first_threads == 0) {
      first_threads = threads;
      if (threads == 0) return false;
    } else if (threads == 0 || config.of * threads >= config.share * first_threads) {
      continue;
    }
    layout->row = row;
    layout->group = threads;
  }
  return first_threads > 0;
}

// Shared memory that a row takes.
struct RingBytes {
  int factors;  // of a block
  int row;      // of a stage
  int most;     // that a block has for rings
};

// Selects rows and stages for a long input: few bytes in flight.
void fill_for_long_input(const RingScheduleConfig& schedule, const RingKernelConfig& kernel, const RingBytes& bytes,
                         int most_rows, RingLayout* layout) {
  const int ring_bytes = std::min(schedule.long_ring_bytes / bytes.row * bytes.row, bytes.most);
  layout->rows = std::max(1, std::min(ring_bytes / (kernel.stages * bytes.row), most_rows));
  const int rows = schedule.long_bytes_in_flight / ((kernel.max_stages - 1) * bytes.row);
  if (schedule.long_bytes_in_flight > 0 && rows * bytes.row >= schedule.long_work_bytes &&
      kernel.max_stages * rows * bytes.row <= bytes.most) {
    layout->rows = rows;
    layout->stages = kernel.max_stages;
  }
}

// Selects rows and stages for other inputs.
void fill_for_short_input(const RingScheduleConfig& schedule, const RingKernelConfig& kernel, const RingBytes& bytes,
                          int64_t rows_per_sm, RingLayout* layout) {
  const auto limit_threads = [&](int threads) {
    if (2 * layout->group <= threads) layout->rows = std::min(layout->rows, threads / layout->group);
  };
  if (rows_per_sm < schedule.few_iterations * layout->rows) limit_threads(schedule.few_max_threads);
  if (rows_per_sm < schedule.fewest_iterations * layout->rows) limit_threads(schedule.fewest_max_threads);
  if (kernel.max_stages * bytes.row * layout->rows <= bytes.most) layout->stages = kernel.max_stages;
}

RingLayout ring_layout(const Backward& problem, const DeviceProperties& device) {
  RingLayout layout{};
  if (!select_ring_kernel(problem, &layout)) return layout;
  const RingKernelConfig& kernel = kRingKernelTable[layout.row];
  const Branch branch = kernel_branch(problem);
  const int schedule_row = find_row(
      kRingScheduleTable, {compiled_capability(), problem.type, branch},
      [&](const RingScheduleConfig& row) { return row.vector_bytes == 0 || row.vector_bytes == kernel.vector_bytes; });
  if (schedule_row < 0) return layout;
  const RingScheduleConfig& schedule = kRingScheduleTable[schedule_row];
  const int element = static_cast<int>(bytes_of(problem.type));
  const int columns = layout.group * kernel.vectors * (kernel.vector_bytes / element);
  RingBytes bytes;
  bytes.factors = columns * static_cast<int>(sizeof(float)) * (branch == Branch::gated ? 2 : 1);
  bytes.row = columns * element * ring_tensors(branch);
  bytes.most = device.max_shared_bytes_per_block - static_cast<int>(kRingStaticBytes) - bytes.factors;
  const int most_rows = std::min(std::max(1, schedule.max_threads / layout.group), kMaxRows);
  layout.stages = kernel.stages;
  layout.rows = std::min(bytes.most / (kernel.stages * bytes.row), most_rows);
  if (layout.rows <= 0) return layout;
  const int64_t rows_per_sm = (problem.rows + device.sms - 1) / device.sms;
  if (rows_per_sm * bytes.row > schedule.long_bytes_per_sm) {
    fill_for_long_input(schedule, kernel, bytes, most_rows, &layout);
  } else {
    fill_for_short_input(schedule, kernel, bytes, rows_per_sm, &layout);
  }
  if constexpr (!kHasNamedBarriers) layout.rows = 1;  // whose barriers are those of the block
  // At least half of an SM's shared memory: with two blocks on an SM that starts early, another SM would have none.
  layout.shared_bytes =
      std::max<size_t>(bytes.factors + bytes.row * layout.stages * layout.rows, device.shared_bytes_per_sm / 2);
  return layout;
}

template <typename T, int kRow, Branch kBranch>
cudaError_t launch_ring(const RingBackward& problem, const RingLayout& layout, int64_t blocks, cudaStream_t stream) {
  const auto kernel = backward_ring_kernel<T, kRow, kBranch>;
  const cudaError_t error = allow_shared_bytes(kernel, layout.shared_bytes, kRingStaticBytes);
  if (error != cudaSuccess) return error;
  return launch_with_pdl(kernel, dim3(static_cast<unsigned>(blocks)), dim3(layout.group, layout.rows),
                         layout.shared_bytes, stream, problem);
}

// Launches the kernel of a layout. Only kernels for the dtypes of their row are compiled.
template <typename T>
cudaError_t launch_ring(const RingBackward& problem, const RingLayout& layout, Branch branch, int64_t blocks,
                        cudaStream_t stream) {
  constexpr unsigned kDtype = dtype_bit(kTypeOf<T>);
  return launch_row<kRingKernelTable, kDtype>(layout.row, [&](auto row) {
    constexpr RingKernelConfig kConfig = kRingKernelTable[row()];
    if (branch == Branch::none) return launch_ring<T, row(), Branch::none>(problem, layout, blocks, stream);
    if constexpr (has_plain_ring(kConfig, kDtype)) {
      if (branch == Branch::plain) return launch_ring<T, row(), Branch::plain>(problem, layout, blocks, stream);
    }
    return launch_ring<T, row(), Branch::gated>(problem, layout, blocks, stream);
  });
}

}  // namespace
}  // namespace adaln
