// A residual and a gated branch, forward and backward, on CUDA.
//
// Reads:    residual, branch and grad, each once; the gate once for the rows that a thread meets in a span.
// Writes:   `sum`; or `grad_branch`, `partial` and `grad_gate`.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// Bytes, for elements of e bytes: forward rows * hidden * 3e; backward the same, with the gradient of the gate or
// without its branch 2e.
#include "adaln_cuda/adaln.h"
#include "adaln_cuda/device.cuh"
#include "adaln_cuda/reduce.cuh"
#include "kit/sums.cuh"

namespace adaln {
namespace {

constexpr int kThreads = 256;
constexpr int kBackwardBlocks = 3;  // on a processor at a time, as `partial_sums` counts them
// Rows of a thread at a time, so that enough loads are on their way. Backward, a block runs for longer, and sums take
// registers.
constexpr int kRows = 4, kBackwardRows = 2;

// How rows are laid over blocks: a thread has one vector of each of its rows.
struct Tiles {
  int columns;        // threads side by side
  int rows;           // threads below one another
  unsigned in_a_row;  // blocks side by side
};

Tiles tiles_of(int64_t hidden, int width) {
  const int64_t vectors = (hidden + width - 1) / width;
  const int64_t in_a_row = (vectors + kThreads - 1) / kThreads;
  const int columns = static_cast<int>((vectors + in_a_row - 1) / in_a_row);
  return {columns, kThreads / columns, static_cast<unsigned>(in_a_row)};
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ Gate problem, Tiles tiles) {
  const int64_t column =
      (static_cast<int64_t>(blockIdx.x % tiles.in_a_row) * tiles.columns + threadIdx.x % tiles.columns) * kWidth;
  const int64_t first =
      static_cast<int64_t>(blockIdx.x / tiles.in_a_row) * tiles.rows * kRows + threadIdx.x / tiles.columns;
  if (column >= problem.hidden) return;
  Vector<T, kWidth> residual[kRows], branch[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first + i * tiles.rows;
    if (row < problem.rows) {
      residual[i] = load_once<T, kWidth>(row_of<T>(problem.residual, row) + column);
      branch[i] = load_once<T, kWidth>(row_of<T>(problem.branch, row) + column);
    }
  }
  float gate[kWidth];
  int64_t span_end = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = first + i * tiles.rows;
    if (row < problem.rows) {
      if (row >= span_end) {
        const int64_t span = span_of(row, problem.span);
        span_end = (span + 1) * problem.span;
        load_modulation<T, kWidth>(problem.gate, span, column, gate);
      }
      float sum[kWidth], product[kWidth];
      decode_all(residual[i].elements, sum);
      decode_all(branch[i].elements, product);
      if (problem.stepwise) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) product[j] *= gate[j];
        round_all<T>(product);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] += product[j];
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum[j] += product[j] * gate[j];
      }
      store_once(static_cast<T*>(problem.sum) + row * problem.hidden + column, encode_all<T>(sum));
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    gate_backward_kernel(const __grid_constant__ GateBackward problem, Tiles tiles) {
  __shared__ float sums_of_rows[kThreads * kWidth];
  const int64_t part = blockIdx.x / tiles.in_a_row;  // of all groups
  const int own = threadIdx.x % tiles.columns;
  const int64_t column = (static_cast<int64_t>(blockIdx.x % tiles.in_a_row) * tiles.columns + own) * kWidth;
  const int64_t group_rows = problem.rows / problem.sums.groups, group = part / problem.sums.parts;
  const int64_t end = column < problem.hidden ? (group + 1) * group_rows : 0;
  const int64_t step = problem.sums.parts * tiles.rows;
  const bool summed = problem.sums.partial != nullptr;
  const bool shared_gate = problem.span > 1;
  float gate[kWidth], sums[kWidth] = {};
  if (shared_gate && end > 0) load_modulation<T, kWidth>(problem.gate, group, column, gate);
  for (int64_t first = group * group_rows + part % problem.sums.parts * tiles.rows + threadIdx.x / tiles.columns;
       first < end; first += step * kBackwardRows) {
    Vector<T, kWidth> grad[kBackwardRows], branch[kBackwardRows];
#pragma unroll
    for (int i = 0; i < kBackwardRows; ++i) {
      const int64_t row = first + i * step;
      if (row < end) {
        grad[i] = load_once<T, kWidth>(row_of<T>(problem.grad, row) + column);
        if (problem.grad_gate != nullptr) branch[i] = load_once<T, kWidth>(row_of<T>(problem.branch, row) + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kBackwardRows; ++i) {
      const int64_t row = first + i * step;
      if (row < end) {
        if (!shared_gate) load_modulation<T, kWidth>(problem.gate, row, column, gate);
        float slope[kWidth];
        decode_all(grad[i].elements, slope);
        if (problem.grad_gate != nullptr) {
          float product[kWidth];
          decode_all(branch[i].elements, product);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            product[j] *= slope[j];
            sums[j] += product[j];
          }
          if (!summed) {
            store_either<T, kWidth>(problem.grad_gate, problem.gate.type, row * problem.hidden + column, product);
          }
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) slope[j] *= gate[j];
        store_once(static_cast<T*>(problem.grad_branch) + row * problem.hidden + column, encode_all<T>(slope));
      }
    }
  }
  if (!summed) return;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sums_of_rows[threadIdx.x * kWidth + j] = sums[j];
  __syncthreads();
  if (threadIdx.x >= tiles.columns || column >= problem.hidden) return;
  for (int i = 1; i < tiles.rows; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sums[j] += sums_of_rows[(i * tiles.columns + own) * kWidth + j];
  }
  store_floats(problem.sums.partial + part * problem.hidden + column, sums);
}

template <typename T, int kWidth>
void launch(const Gate& problem, cudaStream_t stream) {
  const Tiles tiles = tiles_of(problem.hidden, kWidth);
  const int64_t rows = static_cast<int64_t>(tiles.rows) * kRows;
  const auto blocks = static_cast<unsigned>((problem.rows + rows - 1) / rows * tiles.in_a_row);
  gate_kernel<T, kWidth><<<blocks, tiles.columns * tiles.rows, 0, stream>>>(problem, tiles);
}

template <typename T, int kWidth>
void launch(const GateBackward& problem, cudaStream_t stream) {
  const Tiles tiles = tiles_of(problem.hidden, kWidth);
  const auto blocks = static_cast<unsigned>(problem.sums.groups * problem.sums.parts * tiles.in_a_row);
  gate_backward_kernel<T, kWidth><<<blocks, tiles.columns * tiles.rows, 0, stream>>>(problem, tiles);
}

template <typename T>
bool all_aligned(const Gate& problem) {
  return aligned(problem.residual, sizeof(T)) && aligned(problem.branch, sizeof(T)) && aligned(problem.gate) &&
         aligned(problem.sum);
}

template <typename T>
bool all_aligned(const GateBackward& problem) {
  return aligned(problem.grad, sizeof(T)) && aligned(problem.branch, sizeof(T)) && aligned(problem.gate) &&
         aligned(problem.grad_branch) && aligned(problem.grad_gate);
}

template <typename T, typename Problem>
void launch_typed(const Problem& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const bool vectors = problem.hidden % kWidth == 0 && all_aligned<T>(problem);
  return vectors ? launch<T, kWidth>(problem, stream) : launch<T, 1>(problem, stream);
}

template <typename Problem>
cudaError_t launch_any(const Problem& problem, cudaStream_t stream) {
  return with_type(problem.type, [&](auto tag) { launch_typed<typename decltype(tag)::Element>(problem, stream); });
}

}  // namespace

int gate(const Gate& problem, void* stream) { return launch_any(problem, static_cast<cudaStream_t>(stream)); }

int gate_backward(const GateBackward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = launch_any(problem, cuda_stream);
  if (error != cudaSuccess || problem.sums.partial == nullptr) return error;
  Reduction reduction{};
  reduction.hidden = problem.hidden;
  reduction.sums = problem.sums;
  reduction.add(problem.grad_gate, problem.gate.type, false, {0, {}});
  return reduce(reduction, cuda_stream);
}

}  // namespace adaln
