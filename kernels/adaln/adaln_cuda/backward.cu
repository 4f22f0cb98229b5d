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
// backward_general.cuh all others, element by element. The blocks write partial sums, which reduce.cu adds up. The
// order of both sums is fixed, so that equal inputs give equal bits.
#include <type_traits>
#include <utility>

#include "adaln_cuda/backward_general.cuh"
#include "adaln_cuda/backward_short.cuh"
#include "adaln_cuda/gate_rows.cuh"
#include "adaln_cuda/reduce.cuh"
#include "adaln_cuda/ring_layout.cuh"

namespace adaln {
namespace {

// Whether every row has its own modulation. Without modulations there is one group, whatever the span.
bool has_per_row_modulations(const Backward& problem) {
  return problem.span == 1 && (problem.scale.rows.data != nullptr || problem.grad_branch != nullptr);
}

bool ring_takes(const Backward& problem, const RingLayout& layout) {
  return layout.rows > 0 && problem.rows > 1 && !has_per_row_modulations(problem);
}

bool all_aligned(const Backward& problem) {
  const int64_t element = bytes_of(problem.type);
  return problem.hidden % (kVectorBytes / element) == 0 && aligned(problem.grad, element) &&
         aligned(problem.x, element) && aligned(problem.grad_sum, element) && aligned(problem.branch, element) &&
         aligned(problem.gate) && aligned(problem.scale) && aligned(problem.weight.data) &&
         aligned(problem.bias.data) && aligned(problem.grad_x) && aligned(problem.grad_branch) &&
         aligned(problem.grad_scale) && aligned(problem.grad_gate) && aligned(problem.grad_weight) &&
         aligned(problem.grad_bias);
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

ShortBackward short_problem(const Backward& problem, const StridedBackward& strided) {
  const DynamicType type = dynamic_type(problem.type);
  const DynamicType scale_type = dynamic_type(problem.scale.type), gate_type = dynamic_type(problem.gate.type);
  ShortBackward rows{{strided.x, strided.grad, {}, strided.grad_sum, {}, strided.branch},
                     strided.scale,
                     strided.gate,
                     problem.weight.data,
                     problem.bias.data,
                     {type, type, scale_type, type, gate_type, type},
                     scale_type,
                     gate_type,
                     dynamic_type(problem.weight.type),
                     dynamic_type(problem.bias.type),
                     problem.grad_x,
                     problem.grad_branch,
                     nullptr,
                     nullptr,
                     nullptr,
                     nullptr,
                     problem.sums.partial,
                     problem.sums.count,
                     static_cast<uint32_t>(problem.rows / problem.sums.groups),
                     static_cast<uint32_t>(problem.sums.parts),
                     static_cast<int>(problem.hidden),
                     0,
                     0,
                     Average(problem.hidden),
                     problem.eps,
                     problem.centered};
  if (has_per_row_modulations(problem)) {
    std::swap(rows.scale, rows.streams[kStreamScale]);
    std::swap(rows.gate, rows.streams[kStreamGate]);
    rows.grad_scale = problem.grad_scale;
    rows.grad_gate = problem.grad_gate;
  }
  if (problem.rows == 1) {
    rows.partial = nullptr;
    rows.grad_weight = problem.grad_weight;
    rows.grad_bias = problem.grad_bias;
  }
  return rows;
}

RingBackward ring_problem(const Backward& problem, const StridedBackward& strided, const RingLayout& layout) {
  const int64_t step = problem.sums.parts * layout.rows * bytes_of(problem.type);
  return {{strided.x, strided.grad, strided.grad_sum, strided.branch},
          {step * strided.x.row_stride, step * strided.grad.row_stride, step * strided.grad_sum.row_stride,
           step * strided.branch.row_stride},
          strided.scale,
          strided.gate,
          problem.weight.data,
          problem.scale.type,
          problem.gate.type,
          problem.weight.type,
          problem.grad_x,
          problem.grad_branch,
          problem.sums.partial,
          problem.sums.count,
          static_cast<uint32_t>(problem.rows / problem.sums.groups),
          static_cast<uint32_t>(problem.sums.parts),
          static_cast<int>(problem.hidden),
          static_cast<uint32_t>(layout.stages),
          Average(problem.hidden),
          problem.eps,
          problem.centered};
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
      return launch_short(problem, rows, layout, stream);
    }
  }
  if (!rings || !whole) return launch_general(problem, stream);
  const RingBackward rows = ring_problem(problem, strided, ring);
  const Branch branch = kernel_branch(problem);
  cudaError_t error = cudaSuccess;
  dispatch_dtype(problem.type, [&](auto tag) {
    using T = typename decltype(tag)::Element;
    error = launch_ring<T>(rows, ring, branch, problem.sums.groups * problem.sums.parts, stream);
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
    const GateConfig& config = kGateTable[gate_row(problem.type)];
    const auto width = static_cast<int>(kVectorBytes / bytes_of(problem.type));
    const GateLayout layout = gate_layout(config, problem.hidden, width, config.backward_threads);
    rows_at_once = static_cast<int64_t>(layout.rows) * config.backward_rows;
    blocks = std::max<int64_t>(1, config.backward_blocks_per_sm * device.sms / layout.blocks_per_row);
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
    const Term slope_times_normed{kSlopeTimesNormed, problem.weight};
    if (problem.bias.data == nullptr) {
      reduction.add(problem.grad_scale, problem.scale.type, false, slope_times_normed);
    } else {
      reduction.add(problem.grad_scale, problem.scale.type, false, slope_times_normed, {kSlope, problem.bias});
    }
    reduction.add(problem.grad_shift, problem.scale.type, false, {kSlope, {}});
    reduction.add(problem.grad_gate, problem.gate.type, false, {problem.sums.gate(), {}});
  }
  return reduce(reduction, cuda_stream);
}

}  // namespace adaln
