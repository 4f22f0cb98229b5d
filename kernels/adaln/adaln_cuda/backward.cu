// Modulated norms, backward, with and without the gated branch that was added before, on CUDA.
//
// Reads:    grad, x, grad_sum and the branch, each once from memory: a row stays in registers between its sums and its
//           result. Rows too long for that are read again. The norm is computed again, from x.
// Writes:   `grad_x` and `grad_branch`; gradients of modulations that every row has of its own; `partial` when sums are
//           asked for, and what they are summed to.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// Bytes, for elements of e bytes: rows * hidden * 3e, with a branch 6e. Sums take another 8 (12) for each column of
// each part, written and read: with some hundred parts, less than a hundredth of the rest.
//
// Each part of a group of rows is a block, which adds up the rows it meets in registers; reduce.cu adds up what the
// blocks leave. The order of both is fixed, so that equal inputs give equal bits.
#include "adaln_cuda/adaln.h"
#include "adaln_cuda/device.cuh"
#include "adaln_cuda/reduce.cuh"
#include "kit/sums.cuh"

namespace adaln {
namespace {

constexpr int kMostThreads = 1024;
// A branch and vectors of eight elements want more registers than that many threads leave. Rows of so many threads get
// them.
constexpr int kFewThreads = 384;
// Threads of the blocks that add up rows: all that run at a time.
constexpr int kThreadsOnProcessor = 1024, kFewThreadsOnProcessor = 800;

__device__ __forceinline__ bool own_modulations(const Backward& problem) { return problem.span == 1; }

// What one row's elements from `column` on are, and what comes of them.
template <typename T, int kWidth, bool kBranch>
struct Elements {
  Vector<T, kWidth> x, grad, grad_sum, branch;

  __device__ __forceinline__ void read(const Backward& problem, int64_t row, int64_t column) {
    x = load<T, kWidth>(row_of<T>(problem.x, row) + column);
    grad = load<T, kWidth>(row_of<T>(problem.grad, row) + column);
    if constexpr (kBranch) {
      grad_sum = Vector<T, kWidth>{};
      if (problem.grad_sum.data != nullptr) grad_sum = load<T, kWidth>(row_of<T>(problem.grad_sum, row) + column);
      if (problem.grad_gate != nullptr) branch = load<T, kWidth>(row_of<T>(problem.branch, row) + column);
    }
  }

  // The sums of x, or of its squares when it is not centered, and of the gradient of the normed row, or of its products
  // with x.
  __device__ __forceinline__ void add_up(const Backward& problem, int64_t span, int64_t column, bool squared,
                                         float mean, float (&sums)[2]) const {
    float scale[kWidth], weight[kWidth];
    load_modulation<T, kWidth>(problem.scale, span, column, scale);
    load_parameter<T, kWidth>(problem.weight, column, 1.0f, weight);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float value = decode(x.elements[j]) - mean;
      const float slope = decode(grad.elements[j]) * (weight[j] * (1.0f + scale[j]));
      sums[0] += squared ? value * value : value;
      sums[1] += squared ? slope * value : slope;
    }
  }

  // Writes the gradients of the row, and adds what belongs to sums over rows.
  __device__ __forceinline__ void finish(const Backward& problem, int64_t row, int64_t span, int64_t column, float mean,
                                         float mean_slope, float rstd, float along,
                                         float (&sums)[kBranch ? 3 : 2][kWidth]) const {
    const bool own = own_modulations(problem);
    const int64_t index = row * problem.hidden + column;
    float scale[kWidth], weight[kWidth], normed[kWidth], total[kWidth];
    load_modulation<T, kWidth>(problem.scale, span, column, scale);
    load_parameter<T, kWidth>(problem.weight, column, 1.0f, weight);
    Vector<T, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float value = decode(x.elements[j]) - mean, slope = decode(grad.elements[j]), factor = 1.0f + scale[j];
      normed[j] = value * rstd;
      // Rounded as it was when `mean_slope` was summed: of a row of one element nothing may be left, and rstd is large.
      total[j] = rstd * (__fmul_rn(slope, weight[j] * factor) - mean_slope - value * along);
      if constexpr (kBranch) total[j] += decode(grad_sum.elements[j]);
      result.elements[j] = encode<T>(total[j]);
      const float summed = own ? slope * factor : slope;
      sums[kSlopeTimesNormed][j] += summed * normed[j];
      sums[kSlope][j] += summed;
    }
    store(static_cast<T*>(problem.grad_x) + index, result);
    if constexpr (kBranch) {
      float gate[kWidth];
      load_modulation<T, kWidth>(problem.gate, span, column, gate);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        result.elements[j] = encode<T>(total[j] * gate[j]);
        if (problem.grad_gate != nullptr) total[j] *= decode(branch.elements[j]);
      }
      store(static_cast<T*>(problem.grad_branch) + index, result);
      if (problem.grad_gate != nullptr) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[kGate][j] += total[j];
        if (own) store_either<T, kWidth>(problem.grad_gate, problem.gate.type, index, total);
      }
    }
    if (own && problem.grad_scale != nullptr) {
      float bias[kWidth];
      load_parameter<T, kWidth>(problem.bias, column, 0.0f, bias);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) normed[j] = decode(grad.elements[j]) * (normed[j] * weight[j] + bias[j]);
      store_either<T, kWidth>(problem.grad_scale, problem.scale.type, index, normed);
    }
  }
};

template <typename T, int kWidth, bool kBranch, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == kFewThreads ? 2 : 1)
    backward_kernel(const __grid_constant__ Backward problem, int group) {
  constexpr int kSums = kBranch ? 3 : 2, kLoads = 1;
  __shared__ GroupSum<2>::Scratch scratch;
  extern __shared__ float sums_of_rows[];  // [rows_in_block, hidden]
  GroupSum<2> sum_over_group(scratch, group);
  const int hidden = static_cast<int>(problem.hidden);
  const int rows_in_block = blockDim.x / group;
  const int first_column = (threadIdx.x % group) * kWidth;
  const int64_t group_rows = problem.rows / problem.sums.groups, rows_group = blockIdx.x / problem.sums.parts;
  const int64_t end = (rows_group + 1) * group_rows;
  const int64_t step = problem.sums.parts * rows_in_block;
  float row_sums[kLoads][kSums][kWidth] = {};
  const int64_t first = rows_group * group_rows + blockIdx.x % problem.sums.parts * rows_in_block;
  for (int64_t base = first; base < end; base += step) {
    const int64_t row = base + threadIdx.x / group;
    // A thread without a row still takes part in the sums of its warp.
    const int columns = row < end ? hidden : 0;
    const int64_t span = own_modulations(problem) ? row : rows_group;
    Elements<T, kWidth, kBranch> own[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * group * kWidth;
      if (column < columns) own[i].read(problem, row, column);
    }
    float mean = 0.0f, mean_slope = 0.0f;
    if (problem.centered) {
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int column = first_column + i * group * kWidth;
        if (column < columns) own[i].add_up(problem, span, column, false, 0.0f, sums);
      }
      sum_over_group(sums);
      mean = sums[0] / static_cast<float>(hidden);
      mean_slope = sums[1] / static_cast<float>(hidden);
    }
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * group * kWidth;
      if (column < columns) own[i].add_up(problem, span, column, true, mean, sums);
    }
    sum_over_group(sums);
    const float rstd = reciprocal_norm(sums[0], hidden, problem.eps);
    const float along = rstd * rstd * (sums[1] / static_cast<float>(hidden));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * group * kWidth;
      if (column < columns) {
        own[i].finish(problem, row, span, column, mean, mean_slope, rstd, along, row_sums[i]);
      }
    }
  }
  if (problem.sums.partial == nullptr) return;
  float* partial = problem.sums.partial + static_cast<int64_t>(blockIdx.x) * problem.sums.count * hidden;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    if (k == problem.sums.count) return;
    if (rows_in_block > 1) __syncthreads();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * group * kWidth;
      if (column < hidden) {
        if (rows_in_block == 1) {
          store_floats(partial + k * hidden + column, row_sums[i][k]);
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sums_of_rows[threadIdx.x / group * hidden + column + j] = row_sums[i][k][j];
        }
      }
    }
    if (rows_in_block == 1) continue;
    __syncthreads();
    for (int column = threadIdx.x; column < hidden; column += blockDim.x) {
      float sum = 0.0f;
      for (int i = 0; i < rows_in_block; ++i) sum += sums_of_rows[i * hidden + column];
      partial[k * hidden + column] = sum;
    }
  }
}

template <typename T, int kWidth, bool kBranch>
__global__ void __launch_bounds__(kLongBlock) backward_long_kernel(const __grid_constant__ Backward problem) {
  constexpr int kSums = kBranch ? 3 : 2;
  __shared__ GroupSum<2>::Scratch scratch;
  GroupSum<2> sum_over_group(scratch, blockDim.x);
  const int64_t hidden = problem.hidden;
  const int64_t first_column = static_cast<int64_t>(threadIdx.x) * kWidth, step = blockDim.x * kWidth;
  const int64_t group_rows = problem.rows / problem.sums.groups, rows_group = blockIdx.x / problem.sums.parts;
  const int64_t first = rows_group * group_rows + blockIdx.x % problem.sums.parts;
  float* partial = problem.sums.partial == nullptr
                       ? nullptr
                       : problem.sums.partial + static_cast<int64_t>(blockIdx.x) * problem.sums.count * hidden;
  for (int64_t row = first; row < (rows_group + 1) * group_rows; row += problem.sums.parts) {
    const int64_t span = own_modulations(problem) ? row : rows_group;
    float mean = 0.0f, mean_slope = 0.0f;
    Elements<T, kWidth, kBranch> own;
    if (problem.centered) {
      float sums[2] = {0.0f, 0.0f};
      for (int64_t column = first_column; column < hidden; column += step) {
        own.read(problem, row, column);
        own.add_up(problem, span, column, false, 0.0f, sums);
      }
      sum_over_group(sums);
      mean = sums[0] / static_cast<float>(hidden);
      mean_slope = sums[1] / static_cast<float>(hidden);
    }
    float sums[2] = {0.0f, 0.0f};
    for (int64_t column = first_column; column < hidden; column += step) {
      own.read(problem, row, column);
      own.add_up(problem, span, column, true, mean, sums);
    }
    sum_over_group(sums);
    const float rstd = reciprocal_norm(sums[0], hidden, problem.eps);
    const float along = rstd * rstd * (sums[1] / static_cast<float>(hidden));
    for (int64_t column = first_column; column < hidden; column += step) {
      own.read(problem, row, column);
      float row_sums[kSums][kWidth] = {};
      // A thread meets the same columns in every row.
      if (partial != nullptr && row != first) {
#pragma unroll
        for (int k = 0; k < kSums; ++k) {
          if (k < problem.sums.count) load_floats(partial + k * hidden + column, row_sums[k]);
        }
      }
      own.finish(problem, row, span, column, mean, mean_slope, rstd, along, row_sums);
      if (partial != nullptr) {
#pragma unroll
        for (int k = 0; k < kSums; ++k) {
          if (k < problem.sums.count) store_floats(partial + k * hidden + column, row_sums[k]);
        }
      }
    }
  }
}

Shape row_shape(int64_t hidden, int width) {
  if (width == 1) return long_shape(hidden, width);
  // One vector for a thread: it has the sums of its columns, too, and needs the registers for them.
  const Shape shape = shape_of(hidden, width, kMostThreads, 1);
  if (shape.group == kWarp && shape.loads > 1) return {kWarp * shape.loads, 1, 1};
  return shape.loads > 1 ? long_shape(hidden, width) : shape;
}

bool has_few_threads(const Shape& shape, int width, bool branch) {
  return branch && width == 8 && shape.block() <= kFewThreads;
}

template <typename T, int kWidth, bool kBranch>
void launch(const Backward& problem, cudaStream_t stream) {
  const Shape shape = row_shape(problem.hidden, kWidth);
  const auto blocks = static_cast<unsigned>(problem.sums.groups * problem.sums.parts);
  const auto threads = static_cast<unsigned>(shape.block());
  if (shape.loads == 0) {
    backward_long_kernel<T, kWidth, kBranch><<<blocks, threads, 0, stream>>>(problem);
    return;
  }
  const size_t shared =
      problem.sums.partial != nullptr && shape.rows > 1 ? shape.rows * problem.hidden * sizeof(float) : 0;
  if constexpr (kBranch && kWidth == 8) {
    if (has_few_threads(shape, kWidth, kBranch)) {
      backward_kernel<T, kWidth, kBranch, kFewThreads><<<blocks, threads, shared, stream>>>(problem, shape.group);
      return;
    }
  }
  // Single elements are not worth kernels of their own: their rows are read again, from the cache.
  if constexpr (kWidth > 1) {
    backward_kernel<T, kWidth, kBranch, kMostThreads><<<blocks, threads, shared, stream>>>(problem, shape.group);
  }
}

template <typename T, bool kBranch>
void launch_aligned(const Backward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.grad, sizeof(T)) &&
                       aligned(problem.x, sizeof(T)) && aligned(problem.grad_sum, sizeof(T)) &&
                       aligned(problem.branch, sizeof(T)) && aligned(problem.gate) && aligned(problem.scale) &&
                       aligned(problem.weight.data) && aligned(problem.bias.data) && aligned(problem.grad_x) &&
                       aligned(problem.grad_branch) && aligned(problem.grad_scale) && aligned(problem.grad_gate);
  return vectors ? launch<T, kWidth, kBranch>(problem, stream) : launch<T, 1, kBranch>(problem, stream);
}

template <typename T>
void launch_typed(const Backward& problem, cudaStream_t stream) {
  return problem.grad_branch == nullptr ? launch_aligned<T, false>(problem, stream)
                                        : launch_aligned<T, true>(problem, stream);
}

}  // namespace

int partial_sums(int64_t groups, int64_t rows, int64_t hidden, Type type, bool branch, int64_t* parts) {
  int device, processors;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  int width = kVectorBytes / static_cast<int>(bytes_of(type));
  if (hidden % width != 0) width = 1;
  const Shape shape = row_shape(hidden, width);
  const int threads = has_few_threads(shape, width, branch) ? kFewThreadsOnProcessor : kThreadsOnProcessor;
  const int64_t blocks = static_cast<int64_t>(processors) * std::max(1, threads / shape.block());
  *parts = std::max<int64_t>(1, std::min<int64_t>(blocks / groups, blocks_for(rows / groups, shape)));
  return cudaSuccess;
}

int backward(const Backward& problem, void* stream) {
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
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || problem.sums.partial == nullptr) return error;
  Reduction reduction{};
  reduction.hidden = problem.hidden;
  reduction.sums = problem.sums;
  reduction.gate_sum = kGate;
  reduction.weight = {problem.grad_weight, problem.weight.type};
  reduction.bias = {problem.grad_bias, problem.bias.type};
  if (problem.span > 1) {
    reduction.scale = {problem.grad_scale, problem.scale.type};
    reduction.shift = {problem.grad_shift, problem.scale.type};
    reduction.gate = {problem.grad_gate, problem.gate.type};
    reduction.weight_itself = problem.weight;
    reduction.bias_itself = problem.bias;
    reduction.scale_itself = problem.scale;
  }
  return reduce(reduction, cuda_stream);
}

}  // namespace adaln
