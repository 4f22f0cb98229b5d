// Backward of modulated norms of rows of any length and alignment, with modulations and parameters of any dtypes, with
// and without a gated branch that was added before: the general kernel.
//
// Reads:    grad, x, grad_sum and the branch; grad and x several times, after the first time from a cache.
// Writes:   see backward.cu.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// A block loops over the rows of its part of a group. A thread has the same columns of each row, and adds up their sums
// in `partial` without other threads.
#pragma once

#include "adaln_cuda/general_rows.cuh"
#include "kit/launch.cuh"

namespace adaln {
namespace {

// The values computed from a row's sums.
struct GeneralMoments {
  float mean, rstd, mean_slope, projection;
};

// The operands of a row.
struct BackwardElements {
  const Backward& problem;
  int64_t row;
  ElementRow x, grad, scale, weight;

  __device__ __forceinline__ BackwardElements(const Backward& problem, int64_t row, int64_t modulation)
      : problem(problem),
        row(row),
        x(problem.x, problem.type, row),
        grad(problem.grad, problem.type, row),
        scale(problem.scale, modulation),
        weight(problem.weight) {}

  // The gradient of the normed row. It is rounded in the same way wherever it is used: in a row of one element it must
  // cancel exactly, because rstd may be large.
  __device__ __forceinline__ float slope(int64_t column) const {
    return rounded_product(grad.at(column), weight.at(column, 1.0f) * (1.0f + scale.at(column)));
  }

  __device__ __forceinline__ GeneralMoments moments(RowAverages& averages) const {
    float mean = problem.centered ? mean_of(x, problem.hidden, averages) : 0.0f, all[4];
    averages(problem.hidden, all, [&](int64_t column, float (&sums)[4]) {
      const float difference = x.at(column) - mean, own_slope = slope(column);
      sums[0] += problem.centered ? difference : 0.0f;
      sums[1] += difference * difference;
      sums[2] += own_slope;
      sums[3] += own_slope * difference;
    });
    const float rstd = rsqrtf(all[1] - all[0] * all[0] + problem.eps);
    return {mean + all[0], rstd, problem.centered ? all[2] : 0.0f, rstd * rstd * (all[3] - all[2] * all[0])};
  }
};

__global__ void __launch_bounds__(kGeneralThreads)
    backward_general_kernel(const __grid_constant__ Backward problem, const __grid_constant__ Average average) {
  __shared__ RowAverages::Scratch scratch;
  RowAverages averages(scratch, average);
  const int64_t hidden = problem.hidden, group = blockIdx.x / problem.sums.parts;
  const int64_t rows = problem.rows / problem.sums.groups, first_row = blockIdx.x - group * problem.sums.parts;
  const bool own_modulations = problem.span == 1, sums_needed = problem.sums.partial != nullptr && problem.rows > 1;
  float* const partial = problem.sums.partial + blockIdx.x * problem.sums.count * hidden;
  grid_wait();
  trigger_next_grid();  // in this order: reduce_kernel reads factors before its own wait
  for (int64_t index = first_row; index < rows; index += problem.sums.parts) {
    const int64_t row = group * rows + index, modulation = own_modulations ? row : group;
    const BackwardElements elements(problem, row, modulation);
    const ElementRow grad_sum(problem.grad_sum, problem.type, row), bias(problem.bias);
    const ElementRow branch(problem.branch, problem.type, row), gate(problem.gate, modulation);
    const bool has_norm = elements.x.exists();
    const GeneralMoments moments = has_norm ? elements.moments(averages) : GeneralMoments{};
    const auto add = [&](int which, int64_t column, float value) {
      if (!sums_needed || which >= problem.sums.count) return;
      float& sum = partial[which * hidden + column];
      sum = index == first_row ? value : sum + value;
    };
    const auto differentiate_norm = [&](int64_t column, int64_t at) {
      const float difference = elements.x.at(column) - moments.mean, normed = difference * moments.rstd;
      const float grad_norm =
          moments.rstd * (elements.slope(column) - moments.mean_slope - difference * moments.projection);
      const float total = grad_norm + grad_sum.at(column);
      store_as(problem.type, problem.grad_x, at, total);
      float grad = elements.grad.at(column);
      if (own_modulations && problem.grad_scale != nullptr) {
        const float unmodulated = normed * elements.weight.at(column, 1.0f) + bias.at(column);
        store_as(problem.scale.type, problem.grad_scale, at, grad * unmodulated);
      }
      if (own_modulations) grad *= 1.0f + elements.scale.at(column);
      if (problem.rows == 1 && problem.grad_weight != nullptr) {
        store_as(problem.weight.type, problem.grad_weight, column, grad * normed);
      }
      if (problem.rows == 1 && problem.grad_bias != nullptr) {
        store_as(problem.bias.type, problem.grad_bias, column, grad);
      }
      add(kSlope, column, grad);
      add(kSlopeTimesNormed, column, grad * normed);
      return total;
    };
    for_each_column(hidden, [&](int64_t column) {
      const int64_t at = row * hidden + column;
      const float total = has_norm ? differentiate_norm(column, at) : grad_sum.at(column);
      if (problem.grad_branch == nullptr) return;
      store_as(problem.type, problem.grad_branch, at, total * gate.at(column));
      if (problem.grad_gate == nullptr) return;
      const float product = total * branch.at(column);
      if (own_modulations) return store_as(problem.gate.type, problem.grad_gate, at, product);
      add(problem.sums.gate(), column, product);
    });
  }
}

cudaError_t launch_general(const Backward& problem, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(problem.sums.groups * problem.sums.parts);
  return launch_with_pdl(backward_general_kernel, dim3(blocks), dim3(general_threads(problem.hidden)), 0, stream,
                         problem, Average(problem.hidden));
}

}  // namespace
}  // namespace adaln
