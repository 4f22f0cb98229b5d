// RMSNorm, backward: the general kernel, for rows that neither registers nor shared memory hold.
//
// Reads:    x, grad and the weight twice, the second time from a cache; grad_sum once.
// Writes:   `grad_x`, and `partial` when the gradient of the weight is requested.
// Must not: use atomics; assume any alignment for kWidth = 1.
#pragma once

#include "rmsnorm_cuda/backward.cuh"

namespace rmsnorm {

template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxBlockThreads)
    backward_general_kernel(const __grid_constant__ BackwardArguments arguments) {
  __shared__ GroupSums::Scratch scratch;
  GroupSums sum_over_block(scratch, kMaxBlockThreads, 0);
  const int64_t hidden = arguments.long_hidden, step = kMaxBlockThreads * kWidth;
  const int64_t first_column = static_cast<int64_t>(threadIdx.x) * kWidth;
  float* partial = arguments.partial == nullptr ? nullptr : arguments.partial + blockIdx.x * hidden;
  grid_wait();
  trigger_next_grid();
  for (int64_t row = blockIdx.x; row < arguments.rows; row += gridDim.x) {
    const BackwardOffsets offsets(arguments, row);
    const T* x = static_cast<const T*>(arguments.x) + offsets.x;
    const T* grad = static_cast<const T*>(arguments.grad) + offsets.grad;
    float sums[2] = {0.0f, 0.0f};
    for (int64_t column = first_column; column < hidden; column += step) {
      Factors<T, kWidth> factors;
      factors.load_weight(arguments.weight, column);
      float values[kWidth];
      factors.get(arguments.weight, column, values);
      add_to_sums(load<T, kWidth>(x + column), load<T, kWidth>(grad + column), values, sums);
    }
    sum_over_block(sums);
    const RowGradient row_gradient(arguments, sums);
    T* grad_x = static_cast<T*>(arguments.grad_x) + row * hidden;
    const T* grad_sum =
        arguments.grad_sum == nullptr ? nullptr : static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum;
    for (int64_t column = first_column; column < hidden; column += step) {
      Factors<T, kWidth> factors;
      factors.load_weight(arguments.weight, column);
      float values[kWidth], weight_sums[kWidth] = {};
      factors.get(arguments.weight, column, values);
      // A thread has the same columns in every row.
      if (partial != nullptr && row != blockIdx.x) load_floats(partial + column, weight_sums);
      Vector<T, kWidth> other{};
      if (grad_sum != nullptr) other = load<T, kWidth>(grad_sum + column);
      store(grad_x + column, gradient(load<T, kWidth>(x + column), load<T, kWidth>(grad + column), values, row_gradient,
                                      grad_sum != nullptr, other, weight_sums));
      if (partial != nullptr) store_floats(partial + column, weight_sums);
    }
  }
}

}  // namespace rmsnorm
