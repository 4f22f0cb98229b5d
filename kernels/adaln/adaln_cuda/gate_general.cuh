// Gates of rows of any length and alignment, forward and backward: the general kernels.
//
// Reads:    residual, branch and grad, each once; the gate through the L1 cache.
// Writes:   `sum`; or `grad_branch` and either `partial` or `grad_gate`.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// Included by gate.cu.
#pragma once

#include "adaln_cuda/general_rows.cuh"
#include "kit/launch.cuh"

namespace adaln {
namespace {

__global__ void __launch_bounds__(kGeneralThreads) gate_general_kernel(const __grid_constant__ Gate problem) {
  trigger_next_grid();
  grid_wait();
  for (int64_t row = blockIdx.x; row < problem.rows; row += gridDim.x) {
    const ElementRow residual(problem.residual, problem.type, row), branch(problem.branch, problem.type, row);
    const ElementRow gate(problem.gate, row / problem.span);
    for_each_column(problem.hidden, [&](int64_t column) {
      const float sum =
          gated_sum(problem.type, residual.at(column), branch.at(column), gate.at(column), problem.stepwise);
      store_as(problem.type, problem.sum, row * problem.hidden + column, sum);
    });
  }
}

// A block has a part of a group of rows; a thread adds up its columns in `partial`.
__global__ void __launch_bounds__(kGeneralThreads)
    gate_backward_general_kernel(const __grid_constant__ GateBackward problem) {
  const int64_t hidden = problem.hidden, group = blockIdx.x / problem.sums.parts;
  const int64_t rows = problem.rows / problem.sums.groups, first_row = blockIdx.x - group * problem.sums.parts;
  grid_wait();
  trigger_next_grid();
  for (int64_t index = first_row; index < rows; index += problem.sums.parts) {
    const int64_t row = group * rows + index;
    const ElementRow grad(problem.grad, problem.type, row), branch(problem.branch, problem.type, row);
    const ElementRow gate(problem.gate, problem.span == 1 ? row : group);
    for_each_column(hidden, [&](int64_t column) {
      const int64_t at = row * hidden + column;
      const float slope = grad.at(column);
      store_as(problem.type, problem.grad_branch, at, slope * gate.at(column));
      if (problem.grad_gate == nullptr) return;
      const float product = slope * branch.at(column);
      if (problem.sums.partial == nullptr) return store_as(problem.gate.type, problem.grad_gate, at, product);
      float& sum = problem.sums.partial[blockIdx.x * hidden + column];
      sum = index == first_row ? product : sum + product;
    });
  }
}

cudaError_t launch_general(const Gate& problem, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(problem.rows, INT32_MAX));
  return launch_with_pdl(gate_general_kernel, dim3(blocks), dim3(general_threads(problem.hidden)), 0, stream, problem);
}

cudaError_t launch_general(const GateBackward& problem, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(problem.sums.groups * problem.sums.parts);
  return launch_with_pdl(gate_backward_general_kernel, dim3(blocks), dim3(general_threads(problem.hidden)), 0, stream,
                         problem);
}

}  // namespace
}  // namespace adaln
