// RMSNorm, backward, on CUDA.
//
// Reads:    grad, x, grad_sum and the weight, each once from memory: a row stays in registers between its sums and its
//           result. Rows too long for that are read twice. rstd is computed again, from x.
// Writes:   `grad_x`; and, when the gradient of the weight is asked for, `partial` and `grad_weight`.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// The gradient of the weight takes two kernels. The first runs `parts` blocks, and each adds up the rows it meets in
// registers; the second adds up what they leave. The order of both is fixed, so that equal inputs give equal bits.
#include "kit/sums.cuh"
#include "rmsnorm_cuda/device.cuh"
#include "rmsnorm_cuda/rmsnorm.h"

namespace rmsnorm {
namespace {

constexpr int kMostThreads = 512;         // a thread has the sums of its columns, too, and needs the registers for them
constexpr int kThreadsOnProcessor = 512;  // of the blocks that add up rows
constexpr int kReduceColumns = 32, kReduceRows = 32;

template <typename T, int kWidth, int kLoads>
__global__ void __launch_bounds__(kMostThreads) backward_kernel(const __grid_constant__ Backward problem, int group) {
  __shared__ GroupSum<2>::Scratch scratch;
  extern __shared__ float sums_of_groups[];  // [rows_in_block, hidden]
  GroupSum<2> sum_over_group(scratch, group);
  const int hidden = static_cast<int>(problem.hidden);
  const int rows_in_block = blockDim.x / group;
  const int first_column = (threadIdx.x % group) * kWidth;
  float weight_sums[kLoads][kWidth] = {};
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * rows_in_block; base < problem.rows;
       base += static_cast<int64_t>(gridDim.x) * rows_in_block) {
    const int64_t row = base + threadIdx.x / group;
    // A thread without a row still takes part in the sums of its warp.
    const int columns = row < problem.rows ? hidden : 0;
    Vector<T, kWidth> x[kLoads], grad[kLoads];
    if (columns > 0) {
      const T* x_row = row_of<T>(problem.x, row);
      const T* grad_row = row_of<T>(problem.grad, row);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int column = first_column + i * group * kWidth;
        if (column < columns) {
          x[i] = load<T, kWidth>(x_row + column);
          grad[i] = load<T, kWidth>(grad_row + column);
        }
      }
    }
    float sums[2] = {0.0f, 0.0f};  // of x^2, and of x * grad * weight
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * group * kWidth;
      if (column < columns) {
        float weight[kWidth];
        load_weight<T, kWidth>(problem.weight, column, weight);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float value = decode(x[i].elements[j]);
          sums[0] += value * value;
          sums[1] += value * decode(grad[i].elements[j]) * weight[j];
        }
      }
    }
    sum_over_group(sums);
    const float rstd = reciprocal_norm(sums[0], hidden, problem.eps);
    const float along = rstd * rstd * (sums[1] / static_cast<float>(hidden));
    T* grad_x_row = static_cast<T*>(problem.grad_x) + row * hidden;
    const T* grad_sum_row = problem.grad_sum.data == nullptr ? nullptr : row_of<T>(problem.grad_sum, row);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * group * kWidth;
      if (column < columns) {
        float weight[kWidth];
        load_weight<T, kWidth>(problem.weight, column, weight);
        Vector<T, kWidth> grad_sum{};
        if (grad_sum_row != nullptr) grad_sum = load<T, kWidth>(grad_sum_row + column);
        Vector<T, kWidth> result;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float value = decode(x[i].elements[j]), slope = decode(grad[i].elements[j]);
          weight_sums[i][j] += slope * (value * rstd);
          result.elements[j] = encode<T>(rstd * (slope * weight[j] - value * along) + decode(grad_sum.elements[j]));
        }
        store(grad_x_row + column, result);
      }
    }
  }
  if (problem.partial == nullptr) return;
  float* partial_row = problem.partial + static_cast<int64_t>(blockIdx.x) * hidden;
  float* sums_row = sums_of_groups + threadIdx.x / group * hidden;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int column = first_column + i * group * kWidth;
    if (column < hidden) {
      if (rows_in_block == 1) {
        store_floats(partial_row + column, weight_sums[i]);
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums_row[column + j] = weight_sums[i][j];
      }
    }
  }
  if (rows_in_block == 1) return;
  __syncthreads();
  for (int column = threadIdx.x; column < hidden; column += blockDim.x) {
    float sum = 0.0f;
    for (int i = 0; i < rows_in_block; ++i) sum += sums_of_groups[i * hidden + column];
    partial_row[column] = sum;
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kLongBlock) backward_long_kernel(const __grid_constant__ Backward problem) {
  __shared__ GroupSum<2>::Scratch scratch;
  GroupSum<2> sum_over_group(scratch, kLongBlock);
  const int64_t hidden = problem.hidden;
  const int64_t first_column = static_cast<int64_t>(threadIdx.x) * kWidth, step = kLongBlock * kWidth;
  float* partial_row =
      problem.partial == nullptr ? nullptr : problem.partial + static_cast<int64_t>(blockIdx.x) * hidden;
  for (int64_t row = blockIdx.x; row < problem.rows; row += gridDim.x) {
    const T* x_row = row_of<T>(problem.x, row);
    const T* grad_row = row_of<T>(problem.grad, row);
    float sums[2] = {0.0f, 0.0f};  // of x^2, and of x * grad * weight
#pragma unroll 2
    for (int64_t column = first_column; column < hidden; column += step) {
      const auto x = load<T, kWidth>(x_row + column);
      const auto grad = load<T, kWidth>(grad_row + column);
      float weight[kWidth];
      load_weight<T, kWidth>(problem.weight, column, weight);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float value = decode(x.elements[j]);
        sums[0] += value * value;
        sums[1] += value * decode(grad.elements[j]) * weight[j];
      }
    }
    sum_over_group(sums);
    const float rstd = reciprocal_norm(sums[0], hidden, problem.eps);
    const float along = rstd * rstd * (sums[1] / static_cast<float>(hidden));
    T* grad_x_row = static_cast<T*>(problem.grad_x) + row * hidden;
    const T* grad_sum_row = problem.grad_sum.data == nullptr ? nullptr : row_of<T>(problem.grad_sum, row);
    for (int64_t column = first_column; column < hidden; column += step) {
      const auto x = load<T, kWidth>(x_row + column);
      const auto grad = load<T, kWidth>(grad_row + column);
      float weight[kWidth];
      load_weight<T, kWidth>(problem.weight, column, weight);
      Vector<T, kWidth> grad_sum{};
      if (grad_sum_row != nullptr) grad_sum = load<T, kWidth>(grad_sum_row + column);
      Vector<T, kWidth> result;
      float weight_sums[kWidth] = {};
      // A thread meets the same columns in every row.
      if (partial_row != nullptr && row != blockIdx.x) load_floats(partial_row + column, weight_sums);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float value = decode(x.elements[j]), slope = decode(grad.elements[j]);
        weight_sums[j] += slope * (value * rstd);
        result.elements[j] = encode<T>(rstd * (slope * weight[j] - value * along) + decode(grad_sum.elements[j]));
      }
      if (partial_row != nullptr) store_floats(partial_row + column, weight_sums);
      store(grad_x_row + column, result);
    }
  }
}

template <typename W>
__global__ void __launch_bounds__(kReduceColumns* kReduceRows)
    reduce_kernel(const float* partial, int64_t parts, int64_t hidden, W* out) {
  __shared__ float sums[kReduceRows][kReduceColumns];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kReduceColumns + threadIdx.x;
  float sum = 0.0f;
  if (column < hidden) {
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < parts; part += kReduceRows) sum += partial[part * hidden + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= hidden) return;
  for (int i = 1; i < kReduceRows; ++i) sum += sums[i][threadIdx.x];
  out[column] = encode<W>(sum);
}

template <typename T, int kWidth>
void launch(const Backward& problem, cudaStream_t stream) {
  const Shape shape = shape_of(problem.hidden, kWidth, kMostThreads, kMostLoads);
  const unsigned blocks =
      problem.partial == nullptr ? blocks_for(problem.rows, shape) : static_cast<unsigned>(problem.parts);
  const unsigned threads = static_cast<unsigned>(shape.block());
  const size_t shared = problem.partial != nullptr && shape.rows > 1 ? shape.rows * problem.hidden * sizeof(float) : 0;
  if (shape.loads == 0) {
    backward_long_kernel<T, kWidth><<<blocks, threads, 0, stream>>>(problem);
    return;
  }
  if constexpr (kWidth > 1) {
    if (shape.loads == 1) {
      backward_kernel<T, kWidth, 1><<<blocks, threads, shared, stream>>>(problem, shape.group);
      return;
    }
    if (shape.loads == 2) {
      backward_kernel<T, kWidth, 2><<<blocks, threads, shared, stream>>>(problem, shape.group);
      return;
    }
  }
  // Also for short rows of single elements, which are not worth kernels of their own.
  backward_kernel<T, kWidth, kMostLoads><<<blocks, threads, shared, stream>>>(problem, shape.group);
}

template <typename T>
void launch_aligned(const Backward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.x, sizeof(T)) &&
                       aligned(problem.grad, sizeof(T)) && aligned(problem.grad_sum, sizeof(T)) &&
                       aligned(problem.weight.data) && aligned(problem.grad_x);
  return vectors ? launch<T, kWidth>(problem, stream) : launch<T, 1>(problem, stream);
}

template <typename W>
void launch_reduce(const Backward& problem, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((problem.hidden + kReduceColumns - 1) / kReduceColumns);
  reduce_kernel<W><<<blocks, dim3(kReduceColumns, kReduceRows), 0, stream>>>(
      problem.partial, problem.parts, problem.hidden, static_cast<W*>(problem.grad_weight));
}

}  // namespace

int partial_sums(int64_t rows, int64_t hidden, Type type, int64_t* parts) {
  int device, processors;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const Shape shape = shape_of(hidden, kVectorBytes / (type == Type::float32 ? 4 : 2), kMostThreads, kMostLoads);
  const int blocks_on_processor = std::max(1, kThreadsOnProcessor / shape.block());
  *parts = std::min<int64_t>(blocks_for(rows, shape), static_cast<int64_t>(processors) * blocks_on_processor);
  return cudaSuccess;
}

int backward(const Backward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (problem.type) {
    case Type::float32:
      launch_aligned<float>(problem, cuda_stream);
      break;
    case Type::float16:
      launch_aligned<__half>(problem, cuda_stream);
      break;
    case Type::bfloat16:
      launch_aligned<__nv_bfloat16>(problem, cuda_stream);
      break;
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || problem.partial == nullptr) return error;
  switch (problem.weight.type) {
    case Type::float32:
      launch_reduce<float>(problem, cuda_stream);
      break;
    case Type::float16:
      launch_reduce<__half>(problem, cuda_stream);
      break;
    case Type::bfloat16:
      launch_reduce<__nv_bfloat16>(problem, cuda_stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace rmsnorm
