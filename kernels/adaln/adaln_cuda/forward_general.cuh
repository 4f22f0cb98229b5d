// Modulated norms of rows of any length, strides and alignment, with modulations and parameters of any dtypes, with and
// without a branch, gated or not, that is added before: the general kernel.
//
// Reads:    x (the sum where there is a branch) three times, four times in float32, after the first time from a cache;
//           the branch once.
// Writes:   `normed`, and `sum` when there is a branch.
// Must not: allocate, synchronize, or use another stream than the one given; assume any alignment for kWidth = 1.
//
// A block has one row. Loops over single elements are unrolled: one element in flight is too few bytes.
//
// Included by forward.cu: an object of its own would make the package 9 KB larger.
#pragma once

#include "adaln_cuda/device_limits.cuh"
#include "adaln_cuda/forward_sums.cuh"
#include "adaln_cuda/strided_rows.cuh"

namespace adaln {
namespace {

// Loads values of a parameter or a modulation; `otherwise` if there is none.
template <typename T, int kWidth>
__device__ __forceinline__ void load_or(const void* data, Type type, int64_t index, float otherwise,
                                        float (&values)[kWidth]) {
#pragma unroll
  for (float& value : values) value = otherwise;
  if (data != nullptr) load_mixed<T>(data, type, index, values);
}

// Writes the sum of a row and its gated branch, and returns its address.
template <typename T, int kWidth>
__device__ __forceinline__ const T* write_sum(const Forward& problem, int64_t row, int64_t span) {
  const T *const x = row_of<T>(problem.x, row), *const branch = row_of<T>(problem.branch, row);
  T* const sum = static_cast<T*>(problem.sum) + row * problem.hidden;
  const int64_t gate_row = problem.gate.rows.offset(span);
#pragma unroll kWidth == 1 ? 4 : 1
  for (int64_t column = static_cast<int64_t>(threadIdx.x) * kWidth; column < problem.hidden;
       column += blockDim.x * kWidth) {
    float total[kWidth], product[kWidth], gate[kWidth];
    decode_all(load<T, kWidth>(x + column).elements, total);
    decode_all(load<T, kWidth>(branch + column).elements, product);
    load_or<T>(problem.gate.rows.data, problem.gate.type, gate_row + column, 1.0f, gate);
    add_gated<T>(product, gate, problem.stepwise, total);
    store(sum + column, encode_all<T>(total));
  }
  __syncthreads();  // all threads read the first element
  return sum;
}

// Averages of differences from `pivot` and of their squares over a row.
template <typename T, int kWidth, typename Scratch>
__device__ __forceinline__ void average_differences(const T* x, int64_t hidden, float pivot, const Average& average,
                                                    Scratch& scratch, float (&sums)[2]) {
  sums[0] = sums[1] = 0.0f;
#pragma unroll kWidth == 1 ? 4 : 1
  for (int64_t column = static_cast<int64_t>(threadIdx.x) * kWidth; column < hidden; column += blockDim.x * kWidth) {
    float values[kWidth];
    decode_all(load<T, kWidth>(x + column).elements, values);
    add_differences(values, true, pivot, sums[0], sums[1]);
  }
  sum_over_block(sums, scratch);
  sums[0] = average(sums[0]);
  sums[1] = average(sums[1]);
}

// x * (1 + scale) + shift, with each step rounded to T when `stepwise`.
template <typename T, int kWidth>
__device__ __forceinline__ void modulate_row(float (&x)[kWidth], float (&scale)[kWidth], const float (&shift)[kWidth],
                                             bool stepwise) {
  if (!stepwise) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x[j] = fmaf(x[j], scale[j], x[j] + shift[j]);
    return;
  }
  round_to<T>(x);
#pragma unroll
  for (float& factor : scale) factor += 1.0f;
  round_to<T>(scale);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) x[j] *= scale[j];
  round_to<T>(x);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) x[j] += shift[j];
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kGeneralThreads)
    forward_general_kernel(const __grid_constant__ Forward problem, const __grid_constant__ FirstRow first,
                           const __grid_constant__ Average average) {
  __shared__ alignas(16) float scratch[2][kGeneralThreads / kWarp][2];
  const int64_t hidden = problem.hidden, row = first.row + blockIdx.x;
  const int64_t span = first.span + first.spans(blockIdx.x);
  trigger_next_grid();
  grid_wait();
  const T* const x = problem.sum == nullptr ? row_of<T>(problem.x, row) : write_sum<T, kWidth>(problem, row, span);
  float sums[2], mean = 0.0f;
  const float pivot = problem.centered ? decode(x[0]) : 0.0f;
  average_differences<T, kWidth>(x, hidden, pivot, average, scratch[0], sums);
  if (problem.centered) {
    mean = pivot + sums[0];
    if constexpr (sizeof(T) == sizeof(float)) {  // all digits of a float32 mean need a second pass
      average_differences<T, kWidth>(x, hidden, mean, average, scratch[1], sums);
      mean += sums[0];
    }
  } else {
    sums[0] = 0.0f;
  }
  const float rstd = rsqrtf(variance_of(sums[0], sums[1]) + problem.eps);
  const Modulation &scale = problem.scale, &shift = problem.shift;
  const int64_t scale_row = scale.rows.offset(span), shift_row = shift.rows.offset(span);
  const bool affine = problem.weight.data != nullptr || problem.bias.data != nullptr;
  T* const normed = static_cast<T*>(problem.normed) + row * hidden;
#pragma unroll kWidth == 1 ? 4 : 1
  for (int64_t column = static_cast<int64_t>(threadIdx.x) * kWidth; column < hidden; column += blockDim.x * kWidth) {
    float values[kWidth], factors[kWidth], offsets[kWidth];
    decode_all(load<T, kWidth>(x + column).elements, values);
#pragma unroll
    for (float& value : values) value = (value - mean) * rstd;
    if (affine) {
      load_or<T>(problem.weight.data, problem.weight.type, column, 1.0f, factors);
      load_or<T>(problem.bias.data, problem.bias.type, column, 0.0f, offsets);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = fmaf(values[j], factors[j], offsets[j]);
    }
    if (scale.rows.data != nullptr) {
      load_mixed<T>(scale.rows.data, scale.type, scale_row + column, factors);
      load_mixed<T>(shift.rows.data, shift.type, shift_row + column, offsets);
      modulate_row<T>(values, factors, offsets, problem.stepwise);
    }
    store(normed + column, encode_all<T>(values));
  }
}

bool all_aligned(const Forward& problem) {
  const int64_t element = bytes_of(problem.type);
  return problem.hidden % (kVectorBytes / element) == 0 && aligned(problem.x, element) &&
         aligned(problem.branch, element) && aligned(problem.gate) && aligned(problem.scale) &&
         aligned(problem.shift) && aligned(problem.weight.data) && aligned(problem.bias.data) &&
         aligned(problem.normed) && aligned(problem.sum);
}

template <typename T>
cudaError_t launch_general(const Forward& problem, cudaStream_t stream) {
  const int width = all_aligned(problem) ? kVectorWidth<T> : 1;
  const auto kernel = width > 1 ? forward_general_kernel<T, kVectorWidth<T>> : forward_general_kernel<T, 1>;
  return launch_in_parts(problem.rows, problem.span, [&](unsigned rows, const FirstRow& first) {
    return launch_with_pdl(kernel, dim3(rows), dim3(general_threads(problem.hidden, width)), 0, stream, problem, first,
                           Average(problem.hidden));
  });
}

}  // namespace
}  // namespace adaln
