// Modulated norms of rows of any length and alignment, with modulations and parameters of any dtypes, with and without
// a branch, gated or not, that is added before: the general kernel.
//
// Reads:    x and the branch; a row is read several times, after the first time from a cache.
// Writes:   `normed`, and `sum` when there is a branch.
// Must not: allocate, synchronize, or use another stream than the one given.
#pragma once

#include "adaln_cuda/forward_tiles.cuh"
#include "adaln_cuda/general_rows.cuh"
#include "kit/launch.cuh"

namespace adaln {
namespace {

__global__ void __launch_bounds__(kGeneralThreads)
    forward_general_kernel(const __grid_constant__ Forward problem, const __grid_constant__ Average average) {
  __shared__ RowAverages::Scratch scratch;
  RowAverages averages(scratch, average);
  const int64_t hidden = problem.hidden;
  trigger_next_grid();
  grid_wait();
  for (int64_t row = blockIdx.x; row < problem.rows; row += gridDim.x) {
    const int64_t span = row / problem.span, first = row * hidden;
    ElementRow x(problem.x, problem.type, row);
    if (problem.branch.data != nullptr) {
      const ElementRow branch(problem.branch, problem.type, row), gate(problem.gate, span);
      for_each_column(hidden, [&](int64_t column) {
        const float term = branch.at(column), factor = gate.at(column, 1.0f);
        const float sum = problem.stepwise ? x.at(column) + rounded_as(problem.type, term * factor)
                                           : fmaf(term, factor, x.at(column));
        store_as(problem.type, problem.sum, first + column, sum);
      });
      if (problem.normed == nullptr) continue;
      __syncthreads();  // all threads read the first element
      x = {problem.sum, problem.type, first};
    }
    float mean = problem.centered ? mean_of(x, hidden, averages) : 0.0f, moments[4];
    averages(hidden, moments, [&](int64_t column, float (&sums)[4]) {
      const float difference = x.at(column) - mean;
      sums[0] += problem.centered ? difference : 0.0f;
      sums[1] += difference * difference;
    });
    mean += moments[0];
    const float rstd = rsqrtf(variance_of(moments[0], moments[1]) + problem.eps);
    const ElementRow weight(problem.weight), bias(problem.bias), scale(problem.scale, span), shift(problem.shift, span);
    for_each_column(hidden, [&](int64_t column) {
      float normed = fmaf((x.at(column) - mean) * rstd, weight.at(column, 1.0f), bias.at(column));
      if (scale.exists() && problem.stepwise) {
        const float factor = rounded_as(problem.type, 1.0f + scale.at(column));
        normed = rounded_as(problem.type, rounded_as(problem.type, normed) * factor) + shift.at(column);
      } else if (scale.exists()) {
        normed = fmaf(normed, scale.at(column), normed + shift.at(column));
      }
      store_as(problem.type, problem.normed, first + column, normed);
    });
  }
}

cudaError_t launch_general(const Forward& problem, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(problem.rows, INT32_MAX));
  return launch_with_pdl(forward_general_kernel, dim3(blocks), dim3(general_threads(problem.hidden)), 0, stream,
                         problem, Average(problem.hidden));
}

}  // namespace
}  // namespace adaln
