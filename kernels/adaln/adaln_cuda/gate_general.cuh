// Gates of rows of any length and alignment, forward and backward: the general kernels.
//
// Reads:    residual, branch and grad, each once; the gate through the L1 cache.
// Writes:   `sum`; or `grad_branch` and either `partial` or `grad_gate`.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// Included by gate.cu.
#pragma once

#include "adaln_cuda/device_limits.cuh"
#include "adaln_cuda/strided_rows.cuh"
#include "kit/vectors.cuh"

namespace adaln {
namespace {

// A block has a row.
template <typename T, int kRow>
__global__ void __launch_bounds__(kGateTable[kRow].threads)
    gate_general_kernel(const __grid_constant__ Gate problem, const __grid_constant__ FirstRow first) {
  if constexpr (!kInThisCode<kGateTable, kRow>) return;
  const int64_t hidden = problem.hidden, row = first.row + blockIdx.x;
  const int64_t gate_row = problem.gate.rows.offset(first.span + first.spans(blockIdx.x));
  trigger_next_grid();
  grid_wait();
  const T *const residual = row_of<T>(problem.residual, row), *const branch = row_of<T>(problem.branch, row);
  T* const out = static_cast<T*>(problem.sum) + row * hidden;
  for (int64_t column = threadIdx.x; column < hidden; column += blockDim.x) {
    float sum[1] = {decode(residual[column])}, product[1] = {decode(branch[column])}, gate[1];
    load_mixed<T, 1>(problem.gate.rows.data, problem.gate.type, gate_row + column, gate);
    add_gated<T>(product, gate, problem.stepwise, sum);
    out[column] = encode<T>(sum[0]);
  }
}

// A thread has a column of a part of a group of `rows` rows. The lanes of a warp share the search for the starts of the
// next rows.
template <typename T, int kRow>
__global__ void __launch_bounds__(kGateTable[kRow].threads)
    gate_backward_general_kernel(const __grid_constant__ GateBackward problem, int64_t rows, unsigned blocks_per_row) {
  if constexpr (!kInThisCode<kGateTable, kRow>) return;
  constexpr int kRows = kGateTable[kRow].general_rows;
  static_assert(3 * kRows <= kWarp, "a lane for each row of three tensors");
  const Sums& sums = problem.sums;
  const uint32_t part = blockIdx.x / blocks_per_row, parts = static_cast<uint32_t>(sums.parts), group = part / parts;
  const int64_t column = static_cast<int64_t>(blockIdx.x % blocks_per_row) * kGateTable[kRow].threads + threadIdx.x;
  const int64_t end = (group + 1) * rows, column_read = min(column, problem.hidden - 1);
  const bool in_row = column < problem.hidden, product_asked = problem.grad_gate != nullptr;
  const int lane = threadIdx.x % kWarp, row_of_lane = lane % kRows, tensor = lane / kRows;
  float sum = 0.0f;
  for (int64_t row = group * rows + part % parts; row < end; row += kRows * parts) {
    const int64_t own = min(row + row_of_lane * parts, end - 1);
    const Rows& own_rows = tensor == 0 ? problem.grad : tensor == 1 ? problem.branch : problem.gate.rows;
    const int64_t offset = own_rows.offset(tensor > 1 && problem.span > 1 ? group : own);
    const auto offset_of = [&](int index, int i) { return shuffle(offset, index * kRows + i) + column_read; };
    float slopes[kRows], products[kRows], gates[kRows][1];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      slopes[i] = decode(static_cast<const T*>(problem.grad.data)[offset_of(0, i)]);
      const int64_t branch_at = offset_of(1, i);
      products[i] = product_asked ? decode(static_cast<const T*>(problem.branch.data)[branch_at]) : 0.0f;
      load_mixed<T, 1>(problem.gate.rows.data, problem.gate.type, offset_of(2, i), gates[i]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (!in_row || row + i * parts >= end) break;
      const int64_t index = (row + i * parts) * problem.hidden + column;
      static_cast<T*>(problem.grad_branch)[index] = encode<T>(slopes[i] * gates[i][0]);
      const float product[1] = {slopes[i] * products[i]};
      sum += product[0];
      if (product_asked && sums.partial == nullptr) {
        store_mixed<T, 1>(problem.grad_gate, problem.gate.type, index, product);
      }
    }
  }
  if (in_row && sums.partial != nullptr) sums.partial[part * problem.hidden + column] = sum;
}

}  // namespace
}  // namespace adaln
