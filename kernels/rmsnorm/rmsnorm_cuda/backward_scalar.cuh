// RMSNorm, backward: rows that cannot be read in vectors, held in registers.
//
// Reads:    x, grad, grad_sum and the weight, each once.
// Writes:   `grad_x`, and `partial` when the gradient of the weight is requested.
// Must not: use atomics.
//
// Rows are taken from the last to the first: the last ones are still L2-resident when the forward pass or the producer
// of grad has just ended.
#pragma once

#include "rmsnorm_cuda/backward.cuh"

namespace rmsnorm {

// kElements: of a row and tensor that a thread holds.
template <typename T, int kThreads, int kElements>
__global__ void __launch_bounds__(kThreads)
    backward_scalar_kernel(const __grid_constant__ BackwardArguments arguments) {
  __shared__ GroupSums::Scratch scratch;
  extern __shared__ float sums_of_block[];
  const int group = arguments.group, groups = blockDim.x / group, index = threadIdx.x / group;
  const int first_column = threadIdx.x - index * group, hidden = arguments.hidden;
  GroupSums sum_over_group(scratch, group, index);
  grid_wait();
  trigger_next_grid();
  float weight_sums[kElements][1] = {};
  for (int64_t base = arguments.rows - 1 - static_cast<int64_t>(blockIdx.x) * groups; base >= 0;
       base -= static_cast<int64_t>(gridDim.x) * groups) {
    const int64_t row = base - index;
    // A thread without a row still takes part in its warp's reduction.
    const int columns = row >= 0 ? hidden : 0;
    const BackwardOffsets offsets(arguments, row);
    Vector<T, 1> x[kElements], grad[kElements];
    float factors[kElements][1];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int column = first_column + i * group;
      if (column < columns) {
        x[i] = load<T, 1>(static_cast<const T*>(arguments.x) + offsets.x + column);
        grad[i] = load<T, 1>(static_cast<const T*>(arguments.grad) + offsets.grad + column);
        Factors<T, 1>::read(arguments.weight, column, factors[i]);
      }
    }
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (first_column + i * group < columns) add_to_sums(x[i], grad[i], factors[i], sums);
    }
    sum_over_group(sums);
    const RowGradient row_gradient(arguments, sums);
    T* const grad_x = static_cast<T*>(arguments.grad_x) + row * hidden;
    const bool add = arguments.grad_sum != nullptr;
    const T* const grad_sum = static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int column = first_column + i * group;
      if (column < columns) {
        Vector<T, 1> other{};
        if (add) other = load<T, 1>(grad_sum + column);
        store(grad_x + column, gradient(x[i], grad[i], factors[i], row_gradient, add, other, weight_sums[i]));
      }
    }
  }
  if (arguments.partial != nullptr) {
    write_partial<T>(arguments, sums_of_block, index, first_column, group, weight_sums);
  }
}

}  // namespace rmsnorm
