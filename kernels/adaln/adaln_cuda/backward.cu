// Modulated norms, backward, with and without the branch that was added before: selects and launches a kernel. Without
// a gate, the gradients of residual and branch are one tensor, grad_x.
//
// Beyond naive/adaln.cu, which has no backward pass: rows stay on chip between their sums and their result, sums over
// rows in two stages without atomics, PDL, and modulations of any shape.
//
// Reads:    grad, x, grad_sum and the branch, modulations and parameters.
// Writes:   `grad_x` and `grad_branch`; gradients of modulations that have a row for each row of x; `partial` when sums
//           are requested, and the gradients that are the totals of these sums.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// Bytes moved, for elements of e bytes: rows * hidden * 3e, with a branch 4e, with a gate 6e. Sums take another 8 (12
// with a gate) for each column of each part, written and read: with one part for each SM, less than a hundredth of the
// rest.
//
// backward_ring.cuh is the fast path. backward_short.cuh takes short rows and rows with a modulation each, and
// backward_general.cuh all others, element by element. The blocks write partial sums, which reduce.cuh adds up. The
// order of both sums is fixed, so that equal inputs give equal bits.
#include <algorithm>
#include <iterator>
#include <type_traits>
#include <utility>

#include "adaln_cuda/backward_general.cuh"
#include "adaln_cuda/backward_ring.cuh"
#include "adaln_cuda/backward_short.cuh"
#include "adaln_cuda/gate_rows.cuh"
#include "adaln_cuda/reduce.cuh"

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
cudaError_t launch_ring(const RingBackward& problem, const RingLayout& layout, int64_t blocks,
                        const DeviceProperties& device, cudaStream_t stream) {
  const auto kernel = backward_ring_kernel<T, kRow, kBranch>;
  const cudaError_t error = allow_shared_bytes(kernel, layout.shared_bytes, kRingStaticBytes, device);
  if (error != cudaSuccess) return error;
  return launch_with_pdl(kernel, dim3(static_cast<unsigned>(blocks)), dim3(layout.group, layout.rows),
                         layout.shared_bytes, stream, problem);
}

// Launches the kernel of a layout. Only kernels for the dtypes of their row are compiled.
template <typename T>
cudaError_t launch_ring(const RingBackward& problem, const RingLayout& layout, Branch branch, int64_t blocks,
                        const DeviceProperties& device, cudaStream_t stream) {
  constexpr unsigned kDtype = dtype_bit(kTypeOf<T>);
  return launch_row<kRingKernelTable, kDtype>(layout.row, [&](auto row) {
    constexpr RingKernelConfig kConfig = kRingKernelTable[row()];
    if (branch == Branch::none) return launch_ring<T, row(), Branch::none>(problem, layout, blocks, device, stream);
    if constexpr (has_plain_ring(kConfig, kDtype)) {
      if (branch == Branch::plain) return launch_ring<T, row(), Branch::plain>(problem, layout, blocks, device, stream);
    }
    return launch_ring<T, row(), Branch::gated>(problem, layout, blocks, device, stream);
  });
}

// Whether every row has its own modulation. Without modulations there is one group, whatever the span.
bool has_per_row_modulations(const Backward& problem) {
  return problem.span == 1 && (problem.scale.rows.data != nullptr || problem.grad_branch != nullptr);
}

bool ring_takes(const Backward& problem, const RingLayout& layout) {
  return layout.rows > 0 && problem.rows > 1 && !has_per_row_modulations(problem);
}

// The rows of a problem that are evenly strided.
struct StridedBackward {
  StridedRows x, grad, grad_sum, branch, scale, gate;
};

bool as_strided(const Backward& problem, StridedBackward* strided) {
  const int64_t rows = problem.rows / problem.sums.groups;
  const bool rows_strided = problem.rows < INT32_MAX && as_strided(problem.x, rows, &strided->x) &&
                            as_strided(problem.grad, rows, &strided->grad) &&
                            as_strided(problem.grad_sum, rows, &strided->grad_sum) &&
                            as_strided(problem.branch, rows, &strided->branch);
  if (problem.grad_gate == nullptr) strided->branch.data = nullptr;
  const int64_t span = has_per_row_modulations(problem) ? rows : 1;
  return rows_strided && as_strided(problem.scale.rows, span, &strided->scale) &&
         as_strided(problem.gate.rows, span, &strided->gate);
}

BackwardRows backward_rows(const Backward& problem, const StridedBackward& strided) {
  return {strided.scale,
          strided.gate,
          problem.weight.data,
          dynamic_type(problem.scale.type),
          dynamic_type(problem.gate.type),
          dynamic_type(problem.weight.type),
          problem.grad_x,
          problem.grad_branch,
          problem.sums.partial,
          problem.sums.count,
          static_cast<uint32_t>(problem.rows / problem.sums.groups),
          static_cast<uint32_t>(problem.sums.parts),
          static_cast<int>(problem.hidden),
          Average(problem.hidden),
          problem.eps,
          problem.centered};
}

ShortBackward short_problem(const Backward& problem, const StridedBackward& strided) {
  const BackwardRows common = backward_rows(problem, strided);
  const DynamicType type = dynamic_type(problem.type);
  const bool per_row = has_per_row_modulations(problem), one_row = problem.rows == 1;
  ShortBackward rows{common,
                     {strided.x, strided.grad, {}, strided.grad_sum, {}, strided.branch},
                     problem.bias.data,
                     {type, type, common.scale_type, type, common.gate_type, type},
                     dynamic_type(problem.bias.type),
                     per_row ? problem.grad_scale : nullptr,
                     per_row ? problem.grad_gate : nullptr,
                     one_row ? problem.grad_weight : nullptr,
                     one_row ? problem.grad_bias : nullptr};
  if (one_row) rows.partial = nullptr;
  if (per_row) {
    std::swap(rows.scale, rows.streams[kStreamScale]);
    std::swap(rows.gate, rows.streams[kStreamGate]);
  }
  return rows;
}

RingBackward ring_problem(const Backward& problem, const StridedBackward& strided, const RingLayout& layout) {
  RingBackward rows{backward_rows(problem, strided),
                    {strided.x, strided.grad, strided.grad_sum, strided.branch},
                    {},
                    static_cast<uint32_t>(layout.stages)};
  const int64_t step = problem.sums.parts * layout.rows * bytes_of(problem.type);
  for (int k = 0; k < kRingTensors; ++k) rows.steps[k] = step * rows.rows[k].row_stride;
  return rows;
}

cudaError_t launch(const Backward& problem, const DeviceProperties& device, cudaStream_t stream) {
  if (problem.x.data == nullptr) {
    cudaError_t error = cudaSuccess;
    return launch_gate(problem, device, stream, &error) ? error : launch_general(problem, stream);
  }
  const RingLayout ring = ring_layout(problem, device);
  const bool rings = ring_takes(problem, ring), whole = all_aligned(problem);
  StridedBackward strided;
  if (!as_strided(problem, &strided)) return launch_general(problem, stream);
  if (!rings && whole) {
    const ShortLayout layout = short_layout(problem, device);
    if (layout.rows > 0) {
      ShortBackward rows = short_problem(problem, strided);
      return launch_short(problem, rows, layout, device, stream);
    }
  }
  if (!rings || !whole) return launch_general(problem, stream);
  const RingBackward rows = ring_problem(problem, strided, ring);
  const Branch branch = kernel_branch(problem);
  cudaError_t error = cudaSuccess;
  dispatch_dtype(problem.type, [&](auto tag) {
    using T = typename decltype(tag)::Element;
    error = launch_ring<T>(rows, ring, branch, problem.sums.groups * problem.sums.parts, device, stream);
  });
  return error;
}

}  // namespace

int partial_sums(const Backward& problem, int64_t* parts) {
  DeviceProperties device;
  const cudaError_t error = current_device_properties(&device);
  if (error != cudaSuccess) return error;
  int64_t blocks = device.sms, rows_at_once;
  if (problem.x.data == nullptr) {
    const auto width = static_cast<int>(kVectorBytes / bytes_of(problem.type));
    const GateLayout layout = gate_layout(problem.hidden, width, kGateBackwardThreads);
    rows_at_once = static_cast<int64_t>(layout.rows) * kGateBackwardRows;
    blocks = std::max<int64_t>(1, kGateBackwardBlocksPerSm * device.sms / layout.blocks_per_row);
  } else {
    const RingLayout ring = ring_layout(problem, device);
    rows_at_once = ring_takes(problem, ring) ? ring.rows : std::max(1, short_layout(problem, device).rows);
  }
  const int64_t groups = problem.sums.groups, most = (problem.rows / groups + rows_at_once - 1) / rows_at_once;
  *parts = std::max<int64_t>(1, std::min(blocks / groups, most));
  return cudaSuccess;
}

int run(const Backward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  DeviceProperties device;
  cudaError_t error = current_device_properties(&device);
  if (error == cudaSuccess) error = launch(problem, device, cuda_stream);
  if (error != cudaSuccess || problem.sums.partial == nullptr || problem.rows == 1) return error;
  Reduction reduction{};
  reduction.hidden = problem.hidden;
  reduction.sums = problem.sums;
  reduction.add(problem.grad_weight, problem.weight.type, true, {kSlopeTimesNormed, {}});
  reduction.add(problem.grad_bias, problem.bias.type, true, {kSlope, {}});
  if (problem.span > 1) {
    reduction.scale = problem.scale;
    reduction.add(problem.grad_scale, problem.scale.type, false, {kSlopeTimesNormed, problem.weight},
                  {kSlope, problem.bias}, problem.bias.data == nullptr ? 1 : 2);
    reduction.add(problem.grad_shift, problem.scale.type, false, {kSlope, {}});
    reduction.add(problem.grad_gate, problem.gate.type, false, {problem.sums.gate(), {}});
  }
  return reduce(reduction, cuda_stream);
}

}  // namespace adaln
