// Backward of modulated norms of rows of any length, strides and alignment, with modulations and parameters of any
// dtypes, with and without a gated branch that was added before: the general kernel.
//
// Reads:    grad and x two or three times, after the first time from a cache; grad_sum and the branch once.
// Writes:   what backward.cu says.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given; assume any alignment for
//           kWidth = 1.
//
// A block loops over its rows. A thread has the same columns in each row and sums them without other threads: in shared
// memory or, where that is too small, in global memory.
//
// Included by backward.cu.
#pragma once

#include "adaln_cuda/device_limits.cuh"
#include "adaln_cuda/strided_rows.cuh"
#include "kit/group_sums.cuh"
#include "kit/vectors.cuh"

namespace adaln {
namespace {

constexpr size_t kGeneralStaticBytes = 1024;  // of shared memory, at most

// The values computed from a row's sums. The sums are of x - pivot.
struct GeneralMoments {
  float pivot = 0.0f, mean, mean_slope, rstd, projection;
};

// A thread's part of a row.
template <typename T, int kWidth>
struct GeneralRow {
  const Backward& problem;
  int64_t row, scale_row, gate_row;  // rows' offsets in the modulations
  const T *x, *grad;

  __device__ __forceinline__ GeneralRow(const Backward& problem, int64_t row, int64_t group)
      : problem(problem), row(row), x(row_of<T>(problem.x, row)), grad(row_of<T>(problem.grad, row)) {
    const int64_t modulation = problem.span == 1 ? row : group;
    scale_row = problem.scale.rows.offset(modulation);
    gate_row = problem.gate.rows.offset(modulation);
  }

  // Calls `use` with each vector's column.
  template <typename Use>
  __device__ __forceinline__ void for_each_vector(Use&& use) const {
#pragma unroll kWidth == 1 ? 4 : 1
    for (int64_t column = static_cast<int64_t>(threadIdx.x) * kWidth; column < problem.hidden;
         column += blockDim.x * kWidth) {
      use(column);
    }
  }

  __device__ __forceinline__ void read(const void* data, Type type, int64_t index, float otherwise,
                                       float (&values)[kWidth]) const {
#pragma unroll
    for (float& value : values) value = otherwise;
    if (data != nullptr) load_mixed<T>(data, type, index, values);
  }

  // Reads x - pivot; the gradient; and slope, the gradient of the normed row. slope is rounded in the same way wherever
  // it is used: in a row of one element it must cancel exactly, because rstd may be large.
  __device__ __forceinline__ void read_inputs(int64_t column, float pivot, float (&x_values)[kWidth],
                                              float (&grads)[kWidth], float (&slope)[kWidth]) const {
    float weight[kWidth];
    decode_all(load<T, kWidth>(x + column).elements, x_values);
    decode_all(load<T, kWidth>(grad + column).elements, grads);
    read(problem.scale.rows.data, problem.scale.type, scale_row + column, 0.0f, slope);
    read(problem.weight.data, problem.weight.type, column, 1.0f, weight);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      x_values[j] -= pivot;
      slope[j] = rounded_product(grads[j], weight[j] * (1.0f + slope[j]));
    }
  }

  // Sums of x, its squares, slopes, and their products with x.
  __device__ __forceinline__ void sum(float pivot, float4* scratch, float (&totals)[4]) const {
#pragma unroll
    for (float& total : totals) total = 0.0f;
    for_each_vector([&](int64_t column) {
      float x_values[kWidth], grads[kWidth], slope[kWidth];
      read_inputs(column, pivot, x_values, grads, slope);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        totals[0] += x_values[j];
        totals[1] += x_values[j] * x_values[j];
        totals[2] += slope[j];
        totals[3] += slope[j] * x_values[j];
      }
    });
    sum_over_group(totals, scratch);
  }

  // Computes the row's moments. The squares of a row far from zero have lost digits: its sums are computed again, from
  // differences from the mean.
  __device__ __forceinline__ GeneralMoments moments(const Average& average,
                                                    float4 (&scratch)[2][kGeneralThreads / kWarp], int& half) const {
    GeneralMoments result;
    for (bool again = false;; again = true) {
      float totals[4];
      sum(result.pivot, scratch[half], totals);
      half ^= 1;  // a slow warp may still read this half while the next sums are written
      result.mean = problem.centered ? average(totals[0]) : 0.0f;
      const float variance = average(totals[1]) - result.mean * result.mean;
      result.mean_slope = problem.centered ? average(totals[2]) : 0.0f;
      result.rstd = rsqrtf(variance + problem.eps);
      result.projection = result.rstd * result.rstd * average(totals[3] - totals[2] * result.mean);
      if (again || !problem.centered || 4.0f * result.mean * result.mean <= variance) return result;
      result.pivot = result.mean;
    }
  }

  // Writes a vector of the row's gradients, and adds it to the sums over rows with `add`.
  template <typename Add>
  __device__ __forceinline__ void finish(int64_t column, const GeneralMoments& moments, Add&& add) const {
    const bool per_row = problem.span == 1;
    const int64_t index = row * problem.hidden + column;
    float x_values[kWidth], grads[kWidth], total[kWidth], values[kWidth];
    read_inputs(column, moments.pivot, x_values, grads, total);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      x_values[j] -= moments.mean;
      total[j] = moments.rstd * (total[j] - moments.mean_slope - x_values[j] * moments.projection);
      x_values[j] *= moments.rstd;
    }
    if (problem.grad_sum.data != nullptr) {
      decode_all(load<T, kWidth>(row_of<T>(problem.grad_sum, row) + column).elements, values);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) total[j] += values[j];
    }
    store_streaming(static_cast<T*>(problem.grad_x) + index, encode_all<T>(total));
    if (per_row) {
      if (problem.grad_scale != nullptr) {
        float factor[kWidth];
        read(problem.weight.data, problem.weight.type, column, 1.0f, factor);
        read(problem.bias.data, problem.bias.type, column, 0.0f, values);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[j] = grads[j] * (x_values[j] * factor[j] + values[j]);
        store_mixed<T>(problem.grad_scale, problem.scale.type, index, values);
      }
      read(problem.scale.rows.data, problem.scale.type, scale_row + column, 0.0f, values);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) grads[j] *= 1.0f + values[j];
    }
    add(kSlope, grads);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x_values[j] *= grads[j];
    add(kSlopeTimesNormed, x_values);
    if (problem.rows == 1 && problem.grad_bias != nullptr) {
      store_mixed<T>(problem.grad_bias, problem.bias.type, column, grads);
    }
    if (problem.rows == 1 && problem.grad_weight != nullptr) {
      store_mixed<T>(problem.grad_weight, problem.weight.type, column, x_values);
    }
    if (problem.grad_branch == nullptr) return;
    read(problem.gate.rows.data, problem.gate.type, gate_row + column, 0.0f, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] *= total[j];
    store_streaming(static_cast<T*>(problem.grad_branch) + index, encode_all<T>(values));
    if (problem.grad_gate == nullptr) return;
    decode_all(load<T, kWidth>(row_of<T>(problem.branch, row) + column).elements, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] *= total[j];
    add(kGate, values);
    if (per_row) store_mixed<T>(problem.grad_gate, problem.gate.type, index, values);
  }
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(kGeneralThreads)
    backward_general_kernel(const __grid_constant__ Backward problem, const __grid_constant__ Average average,
                            bool shared_sums) {
  extern __shared__ float4 memory[];
  __shared__ float4 scratch[2][kGeneralThreads / kWarp];
  const Sums& of_rows = problem.sums;
  const int64_t hidden = problem.hidden, rows = problem.rows / of_rows.groups;
  const int64_t group = blockIdx.x / of_rows.parts, part = blockIdx.x % of_rows.parts;
  const bool sums_rows = of_rows.partial != nullptr && problem.rows > 1;
  float* const partial = of_rows.partial + static_cast<int64_t>(blockIdx.x) * of_rows.count * hidden;
  float* const sums = shared_sums ? reinterpret_cast<float*>(memory) : partial;  // [count, hidden]
  trigger_next_grid();
  grid_wait();
  int half = 0;
  for (int64_t row = part; row < rows; row += of_rows.parts) {
    const GeneralRow<T, kWidth> own(problem, group * rows + row, group);
    const GeneralMoments moments = own.moments(average, scratch, half);
    own.for_each_vector([&](int64_t column) {
      own.finish(column, moments, [&](int which, const float (&values)[kWidth]) {
        if (!sums_rows || which >= of_rows.count) return;
        float* const to = sums + which * hidden + column;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) to[j] = row == part ? values[j] : to[j] + values[j];
      });
    });
  }
  if (!sums_rows || !shared_sums) return;
  for (int which = 0; which < of_rows.count; ++which) {
    for (int64_t column = static_cast<int64_t>(threadIdx.x) * kWidth; column < hidden; column += blockDim.x * kWidth) {
      float sum[kWidth];
      load_floats(sums + which * hidden + column, sum);
      store_floats(partial + which * hidden + column, sum);
    }
  }
}

// The number of blocks that divide the rows: two on an SM, more where rows are short.
inline int64_t general_blocks(const Backward& problem, int sms) {
  const int width = kVectorBytes / static_cast<int>(bytes_of(problem.type));
  return sms * int64_t{2 * kGeneralThreads / general_threads(problem.hidden, problem.hidden % width == 0 ? width : 1)};
}

inline cudaError_t launch_general(const Backward& problem, bool whole, cudaStream_t stream) {
  const size_t bytes = problem.sums.count * problem.hidden * sizeof(float);
  const bool shared_sums = bytes + kGeneralStaticBytes <= max_shared_bytes_per_block();
  const auto blocks = static_cast<unsigned>(problem.sums.groups * problem.sums.parts);
  cudaError_t error = cudaSuccess;
  dispatch_dtype(problem.type, [&](auto tag) {
    using T = typename decltype(tag)::Element;
    const int width = whole ? kVectorWidth<T> : 1;
    const auto kernel = whole ? backward_general_kernel<T, kVectorWidth<T>> : backward_general_kernel<T, 1>;
    if (shared_sums) error = allow_shared_bytes(kernel, bytes, kGeneralStaticBytes);
    if (error != cudaSuccess) return;
    error = launch_with_pdl(kernel, dim3(blocks), dim3(general_threads(problem.hidden, width)),
                            shared_sums ? bytes : size_t{0}, stream, problem, Average(problem.hidden), shared_sums);
  });
  return error;
}

}  // namespace
}  // namespace adaln
