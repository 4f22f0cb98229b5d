// A residual and a gated branch without a norm, forward and backward, in rows that are evenly strided and aligned.
//
// Beyond naive/adaln.cu, which has no gate alone: vectorized loads, PDL, and sums over rows in two stages.
//
// Reads:    residual, branch and grad, each once; the gate through the L1 cache.
// Writes:   `sum`; or `grad_branch` and either `partial` or `grad_gate`.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// Bytes moved, for elements of e bytes: forward rows * hidden * 3e; backward the same with the gradient of the gate,
// or rows * hidden * 2e without.
#pragma once

#include "adaln_cuda/strided_rows.cuh"
#include "kit/vectors.cuh"

namespace adaln {
namespace {

struct StridedGate {
  StridedRows residual, branch, gate;
  Type gate_type;
  void* sum;
  uint32_t rows, span;
  int64_t hidden;
  FastDivisor spans;
  bool stepwise;
  bool prefetch;  // residual and branch, during the preceding kernel
};

struct StridedGateBackward {
  StridedRows grad, branch, gate;  // branch: data null when the gradient of the gate is not asked for
  Type gate_type;
  void *grad_branch, *grad_gate;
  float* partial;
  uint32_t rows, parts;  // of a group
  int64_t hidden;
  bool shared_gate;  // one for each group; else one for each row
};

// The mapping of rows to blocks: a thread has one vector of each of its rows.
struct GateLayout {
  int columns;  // threads next to each other in a row
  int rows;     // rows of threads
  unsigned blocks_per_row;
};

GateLayout gate_layout(int64_t hidden, int width, int threads) {
  const int64_t vectors = (hidden + width - 1) / width;
  const int64_t blocks_per_row = (vectors + kGateColumns - 1) / kGateColumns;
  const int columns = static_cast<int>((vectors + blocks_per_row - 1) / blocks_per_row);
  return {columns, threads / columns, static_cast<unsigned>(blocks_per_row)};
}

template <typename T>
__global__ void __launch_bounds__(kGateThreads)
    gate_kernel(const __grid_constant__ StridedGate problem, GateLayout layout) {
  constexpr int kWidth = kVectorWidth<T>;
  const int own = threadIdx.x % layout.columns;
  const int64_t column = (static_cast<int64_t>(blockIdx.x % layout.blocks_per_row) * layout.columns + own) * kWidth;
  const uint32_t row = blockIdx.x / layout.blocks_per_row * layout.rows + threadIdx.x / layout.columns;
  const bool in_problem = column < problem.hidden && row < problem.rows;
  const uint32_t span = problem.spans(row), row_of_span = row - span * problem.span;
  const T* residual_at = problem.residual.at<T>(span, row_of_span) + column;
  const T* branch_at = problem.branch.at<T>(span, row_of_span) + column;
  const int64_t gate_at = span * problem.gate.span_stride + column;
  if (in_problem && own == 0) {
    const int64_t elements = min(static_cast<int64_t>(layout.columns) * kWidth, problem.hidden - column);
    if (problem.prefetch) {
      prefetch_row_to_l2(residual_at, elements);
      prefetch_row_to_l2(branch_at, elements);
    }
    if (row_of_span == 0) {
      if (sizeof(T) == sizeof(float) || problem.gate_type == Type::float32) {
        prefetch_row_to_l2(static_cast<const float*>(problem.gate.data) + gate_at, elements);
      } else {
        prefetch_row_to_l2(static_cast<const T*>(problem.gate.data) + gate_at, elements);
      }
    }
  }
  trigger_next_grid();
  grid_wait();
  if (!in_problem) return;
  const auto residual = load<T, kWidth>(residual_at), branch = load<T, kWidth>(branch_at);
  float sum[kWidth], product[kWidth], gate[kWidth];
  load_mixed<T, kWidth>(problem.gate.data, problem.gate_type, gate_at, gate);
  decode_all(residual.elements, sum);
  decode_all(branch.elements, product);
  add_gated<T>(product, gate, problem.stepwise, sum);
  store(static_cast<T*>(problem.sum) + row * problem.hidden + column, encode_all<T>(sum));
}

// A thread's columns of a part of a group of rows.
template <typename T>
struct GateBackwardColumns {
  static constexpr int kWidth = kVectorWidth<T>, kRows = kGateBackwardRows;

  const StridedGateBackward& problem;
  uint32_t group, first_row, step, end;  // step: to the thread's next row
  int64_t column;

  // Prefetches the first rows, by one thread for a block's columns of a row.
  __device__ __forceinline__ void prefetch(int columns) const {
    const int64_t elements = min(static_cast<int64_t>(columns) * kWidth, problem.hidden - column);
    for (uint32_t row = first_row; row < min(end, first_row + kRows * step); row += step) {
      prefetch_row_to_l2(problem.grad.at<T>(group, row) + column, elements);
      if (problem.branch.data != nullptr) prefetch_row_to_l2(problem.branch.at<T>(group, row) + column, elements);
    }
  }

  __device__ __forceinline__ void load_gate(uint32_t index, float (&gate)[kWidth]) const {
    load_mixed<T, kWidth>(problem.gate.data, problem.gate_type, index * problem.gate.span_stride + column, gate);
  }

  // Loads several rows at a time, so that enough loads are in flight. Past the end, the last row again. In words: clang
  // splits vectors where they are loaded, and waits for each.
  __device__ __forceinline__ void load_rows(uint32_t first, uint4 (&grad)[kRows], uint4 (&branch)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t row = min(first + i * step, end - 1);
      grad[i] = *reinterpret_cast<const uint4*>(problem.grad.at<T>(group, row) + column);
      if (problem.branch.data != nullptr) {
        branch[i] = *reinterpret_cast<const uint4*>(problem.branch.at<T>(group, row) + column);
      }
    }
  }

  // Writes the gradients of a row and adds to the sums over rows.
  __device__ __forceinline__ void finish_row(uint32_t row, uint4 grad, uint4 branch, float (&gate)[kWidth],
                                             float (&sums)[kWidth]) const {
    const int64_t index = (static_cast<int64_t>(group) * problem.rows + row) * problem.hidden + column;
    if (!problem.shared_gate) load_gate(row, gate);
    float slope[kWidth];
    decode_all(vector_of<T>(grad).elements, slope);
    if (problem.branch.data != nullptr) {
      float product[kWidth];
      decode_all(vector_of<T>(branch).elements, product);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        product[j] *= slope[j];
        sums[j] += product[j];
      }
      if (problem.partial == nullptr) store_mixed<T, kWidth>(problem.grad_gate, problem.gate_type, index, product);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) slope[j] *= gate[j];
    store(static_cast<T*>(problem.grad_branch) + index, encode_all<T>(slope));
  }
};

template <typename T>
__global__ void LAUNCH_BOUNDS(kGateBackwardThreads, kGateBackwardBlocksPerSm)
    gate_backward_kernel(const __grid_constant__ StridedGateBackward problem, GateLayout layout) {
  using Columns = GateBackwardColumns<T>;
  constexpr int kWidth = Columns::kWidth, kRows = Columns::kRows;
  __shared__ float thread_sums[kGateBackwardThreads * kWidth];
  const uint32_t part = blockIdx.x / layout.blocks_per_row;  // of all groups
  const uint32_t group = part / problem.parts;
  const int own = threadIdx.x % layout.columns;
  const int64_t column = (static_cast<int64_t>(blockIdx.x % layout.blocks_per_row) * layout.columns + own) * kWidth;
  const uint32_t end = column < problem.hidden ? problem.rows : 0;
  const uint32_t step = problem.parts * layout.rows;
  float gate[kWidth], sums[kWidth] = {};
  const uint32_t first_row = (part - group * problem.parts) * layout.rows + threadIdx.x / layout.columns;
  const Columns columns{problem, group, first_row, step, end, column};
  if (own == 0) columns.prefetch(layout.columns);
  grid_wait();
  trigger_next_grid();  // in this order: reduce_kernel reads factors before its own wait
  if (problem.shared_gate && end > 0) columns.load_gate(group, gate);
  for (uint32_t first = first_row; first < end; first += step * kRows) {
    uint4 grad[kRows], branch[kRows];
    columns.load_rows(first, grad, branch);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t row = first + i * step;
      if (row >= end) break;
      columns.finish_row(row, grad[i], branch[i], gate, sums);
    }
  }
  if (problem.partial == nullptr) return;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) thread_sums[threadIdx.x * kWidth + j] = sums[j];
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= layout.columns || column >= problem.hidden) return;
  for (int i = 1; i < layout.rows; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sums[j] += thread_sums[(i * layout.columns + own) * kWidth + j];
  }
  store_floats(problem.partial + part * problem.hidden + column, sums);
}

template <typename T>
bool launch_gate_of(const Forward& problem, const DeviceProperties& device, cudaStream_t stream, cudaError_t* error) {
  constexpr int kWidth = kVectorWidth<T>;
  StridedRows residual, branch, gate;
  if (!all_aligned(problem) || problem.rows >= INT32_MAX || !as_strided(problem.x, problem.span, &residual) ||
      !as_strided(problem.branch, problem.span, &branch) || !as_strided(problem.gate.rows, 1, &gate)) {
    return false;
  }
  const StridedGate strided{residual,
                            branch,
                            gate,
                            problem.gate.type,
                            problem.sum,
                            static_cast<uint32_t>(problem.rows),
                            static_cast<uint32_t>(problem.span),
                            problem.hidden,
                            fast_divisor(problem.span),
                            problem.stepwise,
                            prefetch_pays(device, problem.rows * problem.hidden * int64_t{3 * sizeof(T)})};
  const GateLayout layout = gate_layout(problem.hidden, kWidth, kGateThreads);
  const auto blocks = static_cast<unsigned>((problem.rows + layout.rows - 1) / layout.rows * layout.blocks_per_row);
  *error =
      launch_with_pdl(gate_kernel<T>, dim3(blocks), dim3(layout.columns * layout.rows), 0, stream, strided, layout);
  return true;
}

template <typename T>
bool launch_gate_of(const Backward& problem, const DeviceProperties&, cudaStream_t stream, cudaError_t* error) {
  constexpr int kWidth = kVectorWidth<T>;
  const int64_t rows = problem.rows / problem.sums.groups, parts = problem.sums.groups * problem.sums.parts;
  StridedRows grad, branch, gate;
  if (!all_aligned(problem) || problem.rows >= INT32_MAX || !as_strided(problem.grad_sum, rows, &grad) ||
      !as_strided(problem.branch, rows, &branch) || !as_strided(problem.gate.rows, 1, &gate)) {
    return false;
  }
  if (problem.grad_gate == nullptr) branch.data = nullptr;
  const StridedGateBackward strided{grad,
                                    branch,
                                    gate,
                                    problem.gate.type,
                                    problem.grad_branch,
                                    problem.grad_gate,
                                    problem.sums.partial,
                                    static_cast<uint32_t>(rows),
                                    static_cast<uint32_t>(problem.sums.parts),
                                    problem.hidden,
                                    problem.span > 1};
  const GateLayout layout = gate_layout(problem.hidden, kWidth, kGateBackwardThreads);
  const auto blocks = static_cast<unsigned>(parts * layout.blocks_per_row);
  *error = launch_with_pdl(gate_backward_kernel<T>, dim3(blocks), dim3(layout.columns * layout.rows), 0, stream,
                           strided, layout);
  return true;
}

// Launches the gate of a problem without a norm. Returns false unless its rows are evenly strided and aligned.
template <typename Problem>
bool launch_gate(const Problem& problem, const DeviceProperties& device, cudaStream_t stream, cudaError_t* error) {
  bool taken = false;
  dispatch_dtype(problem.type, [&](auto tag) {
    taken = launch_gate_of<typename decltype(tag)::Element>(problem, device, stream, error);
  });
  return taken;
}

}  // namespace
}  // namespace adaln
