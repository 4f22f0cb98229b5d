// RMSNorm, forward: the general kernel, for rows that registers do not hold and rows that are not read in vectors.
//
// Reads:    x and the residual, or `sum`, twice, the second time from a cache; the weight.
// Writes:   `normed`, and `sum` when there is a residual.
// Must not: assume any alignment for kWidth = 1.
#pragma once

#include "rmsnorm_cuda/forward.cuh"

namespace rmsnorm {

// log2_lanes is kWholeBlock, or 2^log2_lanes lanes share a row.
template <typename T, int kWidth, bool kAdd>
__global__ void __launch_bounds__(kMaxBlockThreads)
    forward_general_kernel(const __grid_constant__ ForwardArguments arguments) {
  __shared__ float4 scratch[kMaxBlockThreads / kWarp / 4];
  const bool block = arguments.log2_lanes == kWholeBlock;
  const int lanes = block ? blockDim.x : 1 << arguments.log2_lanes;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = block ? blockIdx.x : thread >> arguments.log2_lanes;
  const int64_t hidden = row < arguments.rows ? arguments.long_hidden : 0, step = static_cast<int64_t>(lanes) * kWidth;
  const int64_t first_column = static_cast<int64_t>(block ? threadIdx.x : threadIdx.x & (lanes - 1)) * kWidth;
  const ForwardOffsets<kAdd> offsets(arguments, row);
  const T* x = static_cast<const T*>(arguments.x) + offsets.x;
  grid_wait();
  trigger_next_grid();
  float squares = 0.0f;
  if (kAdd) {
    const T* residual = static_cast<const T*>(arguments.residual) + offsets.residual;
    T* sum = static_cast<T*>(arguments.sum) + offsets.sum;
#pragma unroll 2
    for (int64_t column = first_column; column < hidden; column += step) {
      const auto vector = add(load<T, kWidth>(x + column), load<T, kWidth>(residual + column));
      squares += sum_of_squares(vector);
      store(sum + column, vector);
    }
    x = sum;  // each thread reads its own results again
  } else {
#pragma unroll 4
    for (int64_t column = first_column; column < hidden; column += step) {
      squares += sum_of_squares(load<T, kWidth>(x + column));
    }
  }
  if (block) {
    squares = sum_over_block<kMaxBlockThreads / kWarp>(squares, scratch);
  } else {
    float sums[1] = {squares};
    sum_over_lanes(sums, lanes);
    squares = sums[0];
  }
  const float rstd = reciprocal_norm(squares, arguments.inverse_of_hidden, arguments.eps);
#pragma unroll 2
  for (int64_t column = first_column; column < hidden; column += step) {
    auto vector = load<T, kWidth>(x + column);
    Factors<T, kWidth> factors;
    factors.load_weight(arguments.weight, column);
    float values[kWidth];
    factors.get(arguments.weight, column, values);
    store_norm(arguments, offsets.normed + column, vector, rstd, values);
  }
}

}  // namespace rmsnorm
