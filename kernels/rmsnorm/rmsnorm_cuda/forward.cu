// RMSNorm, forward, on CUDA.
//
// Reads:    x, the residual and the weight, each once from memory: a row stays in registers between its sum and its
//           result. Rows too long for that are read twice.
// Writes:   `normed`, and `sum` when there is a residual.
// Must not: allocate, synchronize, or use another stream than the one given.
#include "kit/sums.cuh"
#include "rmsnorm_cuda/device.cuh"
#include "rmsnorm_cuda/rmsnorm.h"

namespace rmsnorm {
namespace {

constexpr int kMostThreads = 512;  // twice as many do not leave enough registers for a row and its residual

template <typename T, int kWidth, int kLoads, bool kAdd>
__global__ void __launch_bounds__(kMostThreads) forward_kernel(const __grid_constant__ Forward problem, int group) {
  __shared__ GroupSum<1>::Scratch scratch;
  GroupSum<1> sum_over_group(scratch, group);
  const int hidden = static_cast<int>(problem.hidden);
  const int rows_in_block = blockDim.x / group;
  const int first_column = (threadIdx.x % group) * kWidth;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * rows_in_block; base < problem.rows;
       base += static_cast<int64_t>(gridDim.x) * rows_in_block) {
    const int64_t row = base + threadIdx.x / group;
    // A thread without a row still takes part in the sums of its warp.
    const int columns = row < problem.rows ? hidden : 0;
    Vector<T, kWidth> x[kLoads];
    if (columns > 0) {
      const T* x_row = row_of<T>(problem.x, row);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int column = first_column + i * group * kWidth;
        if (column < columns) x[i] = load<T, kWidth>(x_row + column);
      }
      if (kAdd) {
        const T* residual_row = row_of<T>(problem.residual, row);
        T* sum_row = static_cast<T*>(problem.sum) + row * hidden;
        Vector<T, kWidth> residual[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int column = first_column + i * group * kWidth;
          if (column < columns) residual[i] = load<T, kWidth>(residual_row + column);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int column = first_column + i * group * kWidth;
          if (column < columns) {
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
              x[i].elements[j] = encode<T>(decode(x[i].elements[j]) + decode(residual[i].elements[j]));
            }
            store(sum_row + column, x[i]);
          }
        }
      }
    }
    float squares[1] = {0.0f};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first_column + i * group * kWidth < columns) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) squares[0] += decode(x[i].elements[j]) * decode(x[i].elements[j]);
      }
    }
    sum_over_group(squares);
    const float rstd = reciprocal_norm(squares[0], hidden, problem.eps);
    T* normed_row = static_cast<T*>(problem.normed) + row * hidden;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * group * kWidth;
      if (column < columns) {
        float weight[kWidth];
        load_weight<T, kWidth>(problem.weight, column, weight);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          x[i].elements[j] = encode<T>(decode(x[i].elements[j]) * rstd * weight[j]);
        }
        store(normed_row + column, x[i]);
      }
    }
  }
}

template <typename T, int kWidth, bool kAdd>
__global__ void __launch_bounds__(kLongBlock) forward_long_kernel(const __grid_constant__ Forward problem) {
  __shared__ GroupSum<1>::Scratch scratch;
  GroupSum<1> sum_over_group(scratch, kLongBlock);
  const int64_t hidden = problem.hidden;
  const int64_t first_column = static_cast<int64_t>(threadIdx.x) * kWidth, step = kLongBlock * kWidth;
  for (int64_t row = blockIdx.x; row < problem.rows; row += gridDim.x) {
    const T* x_row = row_of<T>(problem.x, row);
    float squares[1] = {0.0f};
    if (kAdd) {
      const T* residual_row = row_of<T>(problem.residual, row);
      T* sum_row = static_cast<T*>(problem.sum) + row * hidden;
#pragma unroll 4
      for (int64_t column = first_column; column < hidden; column += step) {
        auto vector = load<T, kWidth>(x_row + column);
        const auto residual = load<T, kWidth>(residual_row + column);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          vector.elements[j] = encode<T>(decode(vector.elements[j]) + decode(residual.elements[j]));
          squares[0] += decode(vector.elements[j]) * decode(vector.elements[j]);
        }
        store(sum_row + column, vector);
      }
      x_row = sum_row;  // each thread reads again what it wrote itself
    } else {
#pragma unroll 4
      for (int64_t column = first_column; column < hidden; column += step) {
        const auto vector = load<T, kWidth>(x_row + column);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) squares[0] += decode(vector.elements[j]) * decode(vector.elements[j]);
      }
    }
    sum_over_group(squares);
    const float rstd = reciprocal_norm(squares[0], hidden, problem.eps);
    T* normed_row = static_cast<T*>(problem.normed) + row * hidden;
#pragma unroll 4
    for (int64_t column = first_column; column < hidden; column += step) {
      auto vector = load<T, kWidth>(x_row + column);
      float weight[kWidth];
      load_weight<T, kWidth>(problem.weight, column, weight);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        vector.elements[j] = encode<T>(decode(vector.elements[j]) * rstd * weight[j]);
      }
      store(normed_row + column, vector);
    }
  }
}

template <typename T, int kWidth, bool kAdd>
void launch(const Forward& problem, cudaStream_t stream) {
  const Shape shape = shape_of(problem.hidden, kWidth, kMostThreads, kWidth > 1 ? 2 : kMostLoads);
  const unsigned blocks = blocks_for(problem.rows, shape);
  const unsigned threads = static_cast<unsigned>(shape.block());
  if (shape.loads == 0) {
    forward_long_kernel<T, kWidth, kAdd><<<blocks, threads, 0, stream>>>(problem);
    return;
  }
  if constexpr (kWidth > 1) {
    if (shape.loads == 1) {
      forward_kernel<T, kWidth, 1, kAdd><<<blocks, threads, 0, stream>>>(problem, shape.group);
      return;
    }
    if (shape.loads == 2) {
      forward_kernel<T, kWidth, 2, kAdd><<<blocks, threads, 0, stream>>>(problem, shape.group);
      return;
    }
  }
  // Also for short rows of single elements, which are not worth kernels of their own.
  forward_kernel<T, kWidth, kMostLoads, kAdd><<<blocks, threads, 0, stream>>>(problem, shape.group);
}

template <typename T, bool kAdd>
void launch_aligned(const Forward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.x, sizeof(T)) &&
                       aligned(problem.residual, sizeof(T)) && aligned(problem.weight.data) &&
                       aligned(problem.normed) && aligned(problem.sum);
  return vectors ? launch<T, kWidth, kAdd>(problem, stream) : launch<T, 1, kAdd>(problem, stream);
}

template <typename T>
void launch_typed(const Forward& problem, cudaStream_t stream) {
  return problem.residual.data == nullptr ? launch_aligned<T, false>(problem, stream)
                                          : launch_aligned<T, true>(problem, stream);
}

}  // namespace

int forward(const Forward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (problem.type) {
    case Type::float32:
      launch_typed<float>(problem, cuda_stream);
      break;
    case Type::float16:
      launch_typed<__half>(problem, cuda_stream);
      break;
    case Type::bfloat16:
      launch_typed<__nv_bfloat16>(problem, cuda_stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace rmsnorm
