// A residual and a gated branch, forward and backward: selects and launches a kernel.
//
// Beyond naive/adaln.cu, which has no gate alone: vectorized loads, PDL, sums over rows in two stages, and gates of any
// shape.
//
// Reads:    residual, branch, gate and grad.
// Writes:   `sum`; or `grad_branch`, `partial` and `grad_gate`.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// Bytes moved, for elements of e bytes: forward rows * hidden * 3e; backward the same with the gradient of the gate,
// or rows * hidden * 2e without.
#include "adaln_cuda/gate_general.cuh"
#include "adaln_cuda/gate_rows.cuh"
#include "adaln_cuda/reduce.cuh"

namespace adaln {
namespace {

int gate_row(Type type) { return find_row(kGateTable, {compiled_capability(), type}); }

template <typename T, int kRow>
cudaError_t launch_rows(const Gate& problem, cudaStream_t stream) {
  constexpr GateConfig kConfig = kGateTable[kRow];
  constexpr int kWidth = kVectorWidth<T>;
  StridedRows residual, branch, gate;
  if (problem.hidden % kWidth == 0 && aligned(problem.residual, sizeof(T)) && aligned(problem.branch, sizeof(T)) &&
      aligned(problem.gate) && aligned(problem.sum) && problem.rows < INT32_MAX &&
      as_strided(problem.residual, problem.span, &residual) && as_strided(problem.branch, problem.span, &branch) &&
      as_strided(problem.gate, &gate)) {
    const StridedGate strided{residual,
                              branch,
                              gate,
                              problem.gate.type,
                              problem.sum,
                              static_cast<uint32_t>(problem.rows),
                              static_cast<uint32_t>(problem.span),
                              problem.hidden,
                              fast_divisor(problem.span),
                              problem.stepwise,
                              prefetch_pays(problem.rows * problem.hidden * int64_t{3 * sizeof(T)})};
    const GateLayout layout = gate_layout(kConfig, problem.hidden, kWidth, kConfig.threads);
    const auto blocks = static_cast<unsigned>((problem.rows + layout.rows - 1) / layout.rows * layout.blocks_per_row);
    return launch_with_pdl(gate_kernel<T, kRow>, dim3(blocks), dim3(layout.columns * layout.rows), 0, stream, strided,
                           layout);
  }
  return launch_general(problem, stream);
}

template <typename T, int kRow>
cudaError_t launch_rows(const GateBackward& problem, cudaStream_t stream) {
  constexpr GateConfig kConfig = kGateTable[kRow];
  constexpr int kWidth = kVectorWidth<T>;
  const int64_t rows = problem.rows / problem.sums.groups, parts = problem.sums.groups * problem.sums.parts;
  StridedRows grad, branch, gate;
  if (problem.hidden % kWidth == 0 && aligned(problem.grad, sizeof(T)) && aligned(problem.branch, sizeof(T)) &&
      aligned(problem.gate) && aligned(problem.grad_branch) && aligned(problem.grad_gate) && problem.rows < INT32_MAX &&
      as_strided(problem.grad, rows, &grad) && as_strided(problem.branch, rows, &branch) &&
      as_strided(problem.gate, &gate)) {
    if (problem.grad_gate == nullptr) branch.data = nullptr;
    const StridedGateBackward strided{grad,
                                      branch,
                                      gate,
                                      problem.gate.type,
                                      problem.grad_branch,
                                      problem.grad_gate,
                                      problem.sums.partial,
                                      static_cast<uint32_t>(rows),
                                      static_cast<uint32_t>(problem.sums.parts),
                                      problem.hidden,
                                      problem.span > 1};
    const GateLayout layout = gate_layout(kConfig, problem.hidden, kWidth, kConfig.backward_threads);
    const auto blocks = static_cast<unsigned>(parts * layout.blocks_per_row);
    return launch_with_pdl(gate_backward_kernel<T, kRow>, dim3(blocks), dim3(layout.columns * layout.rows), 0, stream,
                           strided, layout);
  }
  return launch_general(problem, stream);
}

template <typename Problem>
cudaError_t launch(const Problem& problem, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  dispatch_dtype(problem.type, [&](auto tag) {
    using T = typename decltype(tag)::Element;
    error = launch_row<kGateTable>(gate_row(problem.type),
                                   [&](auto row) { return launch_rows<T, row()>(problem, stream); });
  });
  return error;
}

}  // namespace

int run(const Gate& problem, void* stream) { return launch(problem, static_cast<cudaStream_t>(stream)); }

int partial_sums(const GateBackward& problem, int64_t* parts) {
  int sms;
  const cudaError_t error = sm_count(&sms);
  if (error != cudaSuccess) return error;
  const GateConfig& config = kGateTable[gate_row(problem.type)];
  const GateLayout layout = gate_layout(config, problem.hidden, kVectorBytes / static_cast<int>(bytes_of(problem.type)),
                                        config.backward_threads);
  const int64_t rows_at_once = static_cast<int64_t>(layout.rows) * config.backward_rows, groups = problem.sums.groups;
  const int64_t blocks = std::max<int64_t>(1, config.backward_blocks_per_sm * sms / layout.blocks_per_row);
  const int64_t most = (problem.rows / groups + rows_at_once - 1) / rows_at_once;
  *parts = std::max<int64_t>(1, std::min(blocks / groups, most));
  return cudaSuccess;
}

int run(const GateBackward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = launch(problem, cuda_stream);
  if (error != cudaSuccess || problem.sums.partial == nullptr) return error;
  Reduction reduction{};
  reduction.hidden = problem.hidden;
  reduction.sums = problem.sums;
  reduction.add(problem.grad_gate, problem.gate.type, false, {0, {}});
  return reduce(reduction, cuda_stream);
}

}  // namespace adaln
