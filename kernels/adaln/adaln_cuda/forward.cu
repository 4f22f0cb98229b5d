// Modulated norms, with and without a gated branch that is added before, on CUDA.
//
// Reads:    x and the branch, each once from memory: a row stays in registers between its sums and its result. Rows too
//           long for that are read again. Parameters and modulations once for the rows that a thread meets in a span.
// Writes:   `normed`, and `sum` when there is a branch.
// Must not: allocate, synchronize, or use another stream than the one given.
//
// Bytes, for elements of e bytes and modulations of m bytes: rows * hidden * 2e (4e with a branch), and beside them
// rows / span * hidden * 2m (3m). To reach a copy's speed nothing else may come from the L2 cache as often as x does:
// hence the several rows of a thread, while the next of which is already on its way.
#include "adaln_cuda/adaln.h"
#include "adaln_cuda/device.cuh"
#include "kit/sums.cuh"

namespace adaln {
namespace {

constexpr int kMostThreads = 512;
constexpr int kMostSteps = 4;          // rows of a thread; more of them leave the last blocks to run alone for longer
constexpr int64_t kManyBlocks = 1024;  // as many as a large GPU runs at a time, about

// Rows as they come from memory, a thread's share of them.
template <typename T, int kWidth, int kLoads, bool kBranch>
struct Row {
  Vector<T, kWidth> x[kLoads], branch[kBranch ? kLoads : 1];

  __device__ __forceinline__ void read(const Forward& problem, int64_t row, int first_column, int group) {
    if (row >= problem.rows) return;
    const T* x_row = row_of<T>(problem.x, row);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * group * kWidth;
      if (column < problem.hidden) x[i] = load<T, kWidth>(x_row + column);
    }
    if constexpr (kBranch) {
      const T* branch_row = row_of<T>(problem.branch, row);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int column = first_column + i * group * kWidth;
        if (column < problem.hidden) branch[i] = load<T, kWidth>(branch_row + column);
      }
    }
  }
};

// The reciprocal norm, from the sums of the deviations from the mean and of their squares. The first tells how far off
// the mean is, which was rounded to float32 at every step of a sum, and corrects it.
__device__ __forceinline__ float finish_norm(const Forward& problem, const float (&sums)[2], float& mean) {
  if (!problem.centered) return reciprocal_norm(sums[1], problem.hidden, problem.eps);
  const float correction = sums[0] / static_cast<float>(problem.hidden);
  mean += correction;
  return reciprocal_norm(sums[1] - correction * sums[0], problem.hidden, problem.eps);
}

template <typename T, int kWidth, int kLoads, bool kBranch>
__global__ void __launch_bounds__(kMostThreads)
    forward_kernel(const __grid_constant__ Forward problem, int group, int steps) {
  // Whether a thread keeps the factors of its columns from row to row, and reads the next row ahead. Long rows lack the
  // registers, and keep enough loads on their way without.
  constexpr bool kSeveral = kLoads * kWidth <= (kBranch ? 8 : 16);
  __shared__ GroupSum<1>::Scratch sum_scratch;
  __shared__ GroupSum<2>::Scratch sums_scratch;
  GroupSum<1> sum_over_group(sum_scratch, group);
  GroupSum<2> sums_over_group(sums_scratch, group);
  const int hidden = static_cast<int>(problem.hidden);
  const int rows_in_block = blockDim.x / group;
  const int first_column = (threadIdx.x % group) * kWidth;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * rows_in_block * steps;
  float factor[kSeveral ? kLoads : 1][kWidth], offset[kSeveral ? kLoads : 1][kWidth];
  int64_t span = 0, span_end = 0;  // which one these are for, and the first row that they are not for
  Row<T, kWidth, kLoads, kBranch> next;
  if (kSeveral) next.read(problem, base + threadIdx.x / group, first_column, group);
  for (int step = 0; step < steps; ++step) {
    const int64_t first_row = base + static_cast<int64_t>(step) * rows_in_block;
    if (first_row >= problem.rows) return;
    const int64_t row = first_row + threadIdx.x / group;
    // A thread without a row still takes part in the sums of its warp.
    const int columns = row < problem.rows ? hidden : 0;
    Row<T, kWidth, kLoads, kBranch> own;
    if (kSeveral) {
      own = next;
      if (step + 1 < steps) next.read(problem, row + rows_in_block, first_column, group);
    } else {
      own.read(problem, row, first_column, group);
    }
    if (columns > 0 && row >= span_end) {
      span = span_of(row, problem.span);
      span_end = (span + 1) * problem.span;
      if constexpr (kSeveral) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int column = first_column + i * group * kWidth;
          if (column < columns) load_affine<T, kWidth>(problem, span, column, factor[i], offset[i]);
        }
      }
    }
    if constexpr (kBranch) {
      T* sum_row = static_cast<T*>(problem.sum) + row * hidden;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int column = first_column + i * group * kWidth;
        if (column < columns) {
          float gate[kWidth];
          load_modulation<T, kWidth>(problem.gate, span, column, gate);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            const float branch = decode(own.branch[i].elements[j]);
            own.x[i].elements[j] = encode<T>(decode(own.x[i].elements[j]) + branch * gate[j]);
          }
          store(sum_row + column, own.x[i]);
        }
      }
    }
    float mean = 0.0f;
    if (problem.centered) {
      float sum[1] = {0.0f};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first_column + i * group * kWidth < columns) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) sum[0] += decode(own.x[i].elements[j]);
        }
      }
      sum_over_group(sum);
      mean = sum[0] / static_cast<float>(hidden);
    }
    float sums[2] = {0.0f, 0.0f};  // of the deviations, and of their squares
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first_column + i * group * kWidth < columns) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float value = decode(own.x[i].elements[j]) - mean;
          sums[0] += value;
          sums[1] += value * value;
        }
      }
    }
    sums_over_group(sums);
    const float rstd = finish_norm(problem, sums, mean);
    T* normed_row = static_cast<T*>(problem.normed) + row * hidden;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = first_column + i * group * kWidth;
      if (column < columns) {
        const int kept = kSeveral ? i : 0;
        if constexpr (!kSeveral) load_affine<T, kWidth>(problem, span, column, factor[kept], offset[kept]);
        Vector<T, kWidth> normed;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float value = (decode(own.x[i].elements[j]) - mean) * rstd;
          normed.elements[j] = encode<T>(value * factor[kept][j] + offset[kept][j]);
        }
        store(normed_row + column, normed);
      }
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kLongBlock) forward_long_kernel(const __grid_constant__ Forward problem) {
  __shared__ GroupSum<1>::Scratch sum_scratch;
  __shared__ GroupSum<2>::Scratch sums_scratch;
  GroupSum<1> sum_over_group(sum_scratch, blockDim.x);
  GroupSum<2> sums_over_group(sums_scratch, blockDim.x);
  const int64_t hidden = problem.hidden;
  const int64_t first_column = static_cast<int64_t>(threadIdx.x) * kWidth, step = blockDim.x * kWidth;
  for (int64_t row = blockIdx.x; row < problem.rows; row += gridDim.x) {
    const int64_t span = span_of(row, problem.span);
    const T* x_row = row_of<T>(problem.x, row);
    if (problem.branch.data != nullptr) {
      const T* branch_row = row_of<T>(problem.branch, row);
      T* sum_row = static_cast<T*>(problem.sum) + row * hidden;
#pragma unroll 4
      for (int64_t column = first_column; column < hidden; column += step) {
        auto x = load<T, kWidth>(x_row + column);
        const auto branch = load<T, kWidth>(branch_row + column);
        float gate[kWidth];
        load_modulation<T, kWidth>(problem.gate, span, column, gate);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          x.elements[j] = encode<T>(decode(x.elements[j]) + decode(branch.elements[j]) * gate[j]);
        }
        store(sum_row + column, x);
      }
      x_row = sum_row;  // each thread reads again what it wrote itself
    }
    float mean = 0.0f;
    if (problem.centered) {
      float sum[1] = {0.0f};
#pragma unroll 4
      for (int64_t column = first_column; column < hidden; column += step) {
        const auto x = load<T, kWidth>(x_row + column);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[0] += decode(x.elements[j]);
      }
      sum_over_group(sum);
      mean = sum[0] / static_cast<float>(hidden);
    }
    float sums[2] = {0.0f, 0.0f};  // of the deviations, and of their squares
#pragma unroll 4
    for (int64_t column = first_column; column < hidden; column += step) {
      const auto x = load<T, kWidth>(x_row + column);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float value = decode(x.elements[j]) - mean;
        sums[0] += value;
        sums[1] += value * value;
      }
    }
    sums_over_group(sums);
    const float rstd = finish_norm(problem, sums, mean);
    T* normed_row = static_cast<T*>(problem.normed) + row * hidden;
    for (int64_t column = first_column; column < hidden; column += step) {
      auto x = load<T, kWidth>(x_row + column);
      float factor[kWidth], offset[kWidth];
      load_affine<T, kWidth>(problem, span, column, factor, offset);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        x.elements[j] = encode<T>((decode(x.elements[j]) - mean) * rstd * factor[j] + offset[j]);
      }
      store(normed_row + column, x);
    }
  }
}

// `loads`: how many vectors a thread should have. Several warps for a row rather than more vectors, so that a thread
// has few enough columns to keep their factors.
Shape row_shape(int64_t hidden, int width, int loads) {
  const Shape shape = shape_of(hidden, width, kMostThreads, loads);
  if (shape.group == kWarp && shape.loads > loads) return {kWarp * shape.loads / loads, 1, loads};
  return shape;
}

// How many rows a thread should meet, one after another.
int steps_for(const Forward& problem, const Shape& shape) {
  const int64_t most = std::min<int64_t>(kMostSteps, problem.span / shape.rows);
  return static_cast<int>(std::max<int64_t>(1, std::min(most, problem.rows / shape.rows / kManyBlocks)));
}

template <typename T, int kWidth>
void launch_long(const Forward& problem, cudaStream_t stream) {
  const Shape shape = long_shape(problem.hidden, kWidth);
  forward_long_kernel<T, kWidth><<<blocks_for(problem.rows, shape), shape.block(), 0, stream>>>(problem);
}

template <typename T, bool kBranch>
void launch(const Forward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  // A branch takes registers, too, as long as one vector for a thread makes enough of them.
  const int loads = kBranch && problem.hidden <= kMostThreads * kWidth ? 1 : 2;
  const Shape shape = row_shape(problem.hidden, kWidth, loads);
  if (shape.loads == 0 || shape.loads > loads) return launch_long<T, kWidth>(problem, stream);
  const int steps = steps_for(problem, shape);
  const int64_t rows_of_block = static_cast<int64_t>(shape.rows) * steps;
  const auto blocks = static_cast<unsigned>((problem.rows + rows_of_block - 1) / rows_of_block);
  const auto threads = static_cast<unsigned>(shape.block());
  if constexpr (kBranch) {
    if (loads == 1) {
      forward_kernel<T, kWidth, 1, kBranch><<<blocks, threads, 0, stream>>>(problem, shape.group, steps);
      return;
    }
  }
  forward_kernel<T, kWidth, 2, kBranch><<<blocks, threads, 0, stream>>>(problem, shape.group, steps);
}

template <typename T, bool kBranch>
void launch_aligned(const Forward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && aligned(problem.x, sizeof(T)) &&
                       aligned(problem.branch, sizeof(T)) && aligned(problem.gate) && aligned(problem.scale) &&
                       aligned(problem.shift) && aligned(problem.weight.data) && aligned(problem.bias.data) &&
                       aligned(problem.normed) && aligned(problem.sum);
  // Single elements are not worth kernels of their own: their rows are read again, from the cache.
  return vectors ? launch<T, kBranch>(problem, stream) : launch_long<T, 1>(problem, stream);
}

template <typename T>
void launch_typed(const Forward& problem, cudaStream_t stream) {
  return problem.branch.data == nullptr ? launch_aligned<T, false>(problem, stream)
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

}  // namespace adaln
