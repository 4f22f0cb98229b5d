// A residual and a gated branch, forward and backward, on CUDA.
//
// Reads:    residual, branch and grad, each once; the gate by way of the processor's cache.
// Writes:   `sum`; or `grad_branch`, `partial` and `grad_gate`.
// Must not: allocate, synchronize, use atomics, or use another stream than the one given.
//
// Bytes, for elements of e bytes: forward rows * hidden * 3e; backward the same, with the gradient of the gate or
// without its branch 2e.
#include "adaln_cuda/adaln.h"
#include "adaln_cuda/device.cuh"
#include "adaln_cuda/reduce.cuh"

namespace adaln {
namespace {

constexpr int kThreads = 256;
// Backward, few large blocks, so that few partial sums are left to be summed.
constexpr int kBackwardThreads = 640, kBackwardBlocks = 1;
constexpr int kBackwardRows = 2, kAnyRows = 4;  // of a thread at a time, so that enough loads are on their way

// A vector of a row that may start anywhere: it may begin before the row and end behind it. What is outside is zero,
// and is not written. It moves as a whole where it lies so, else element by element.
template <int kWidth>
struct Part {
  int64_t column;  // of the row, where the vector begins; negative before it
  int begin, end;  // of those elements of the vector that are the row's

  __device__ __forceinline__ Part(int64_t column, int64_t hidden)
      : column(column),
        begin(column < 0 ? static_cast<int>(-column) : 0),
        end(hidden - column < kWidth ? static_cast<int>(hidden - column) : kWidth) {}

  __device__ __forceinline__ bool has(int element) const { return element >= begin && element < end; }
  __device__ __forceinline__ bool whole() const { return begin == 0 && end == kWidth; }

  template <typename T>
  __device__ __forceinline__ bool movable(const T* row) const {
    constexpr size_t kBytes = sizeof(T) * kWidth < kVectorBytes ? sizeof(T) * kWidth : kVectorBytes;
    return whole() && reinterpret_cast<uintptr_t>(row + column) % kBytes == 0;
  }
};

template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> load_part(const T* row, const Part<kWidth>& part) {
  if (part.movable(row)) return load<T, kWidth>(row + part.column);
  Vector<T, kWidth> vector;
  if (part.whole()) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector.elements[i] = row[part.column + i];
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector.elements[i] = part.has(i) ? row[part.column + i] : encode<T>(0.0f);
  }
  return vector;
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_part(T* row, const Part<kWidth>& part, const Vector<T, kWidth>& vector) {
  if (part.movable(row)) return store(row + part.column, vector);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (part.has(i)) row[part.column + i] = vector.elements[i];
  }
}

// A row of what is of the type of the rows, T, or float32; or of nothing.
class EitherRow {
 public:
  __device__ __forceinline__ EitherRow(const void* data, Type type, int64_t start)
      : data_(data), type_(type), start_(start) {}

  // `otherwise` where there is no such row.
  template <typename T, int kWidth>
  __device__ __forceinline__ void load(const Part<kWidth>& part, float otherwise, float (&values)[kWidth]) const {
    if (data_ == nullptr) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i] = otherwise;
    } else if (sizeof(T) < sizeof(float) && type_ != Type::float32) {
      decode_all(load_part(static_cast<const T*>(data_) + start_, part).elements, values);
    } else {
      const float* row = static_cast<const float*>(data_) + start_;
      if (part.movable(row)) return load_floats(row + part.column, values);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i] = part.has(i) ? row[part.column + i] : 0.0f;
    }
  }

 private:
  const void* data_;
  Type type_;
  int64_t start_ = 0;
};

// Rows that can be read in vectors.
struct GateLines {
  Lines residual, branch, gate;
  Type gate_type;
  void* sum;
  uint32_t rows, span;
  int64_t hidden;
  Divider spans;
  bool stepwise;
  bool early;  // whether rows are asked for before they may be read
};

struct GateBackwardLines {
  Lines grad, branch, gate;  // branch: data null when the gradient of the gate is not asked for
  Type gate_type;
  void *grad_branch, *grad_gate;
  float* partial;
  uint32_t rows, parts;  // of a group
  int64_t hidden;
  bool shared_gate;  // of a group; else each row has one of its own
};

// How rows are laid over blocks: a thread has one vector of each of its rows.
struct Tiles {
  int columns;        // threads side by side
  int rows;           // threads below one another
  unsigned in_a_row;  // blocks side by side
};

Tiles tiles_of(int64_t hidden, int width, int threads) {
  const int64_t vectors = (hidden + width - 1) / width;
  const int64_t in_a_row = (vectors + kThreads - 1) / kThreads;
  const int columns = static_cast<int>((vectors + in_a_row - 1) / in_a_row);
  return {columns, threads / columns, static_cast<unsigned>(in_a_row)};
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ GateLines problem, Tiles tiles) {
  const int own = threadIdx.x % tiles.columns;
  const int64_t column = (static_cast<int64_t>(blockIdx.x % tiles.in_a_row) * tiles.columns + own) * kWidth;
  const uint32_t row = blockIdx.x / tiles.in_a_row * tiles.rows + threadIdx.x / tiles.columns;
  const bool there = column < problem.hidden && row < problem.rows;
  const uint32_t span = problem.spans(row), row_of_span = row - span * problem.span;
  const T* residual_at = problem.residual.at<T>(span, row_of_span) + column;
  const T* branch_at = problem.branch.at<T>(span, row_of_span) + column;
  const int64_t gate_at = span * problem.gate.span_stride + column;
  if (there && own == 0) {
    const int64_t elements = min(static_cast<int64_t>(tiles.columns) * kWidth, problem.hidden - column);
    if (problem.early) {
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
  if (!there) return;
  const auto residual = load<T, kWidth>(residual_at), branch = load<T, kWidth>(branch_at);
  float sum[kWidth], product[kWidth], gate[kWidth];
  load_either<T, kWidth>(problem.gate.data, problem.gate_type, gate_at, gate);
  decode_all(residual.elements, sum);
  decode_all(branch.elements, product);
  add_gated<T>(product, gate, problem.stepwise, sum);
  store(static_cast<T*>(problem.sum) + row * problem.hidden + column, encode_all<T>(sum));
}

// Rows wherever they lie, a block for each. Its vectors are those of `sum`. Where rows begin, the lanes of a warp find
// for one another.
template <typename T>
__global__ void __launch_bounds__(kThreads) gate_any_kernel(const __grid_constant__ Gate problem, First first) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const int lane = threadIdx.x % kWarp;
  const int64_t hidden = problem.hidden, row = first.row + blockIdx.x;
  const Rows& rows = lane == 0 ? problem.residual : lane == 1 ? problem.branch : problem.gate.rows;
  const int64_t offset = rows.offset(lane < 2 ? row : first.span + first.spans(blockIdx.x));
  if (threadIdx.x < 2) prefetch_row_to_l2(static_cast<const T*>(rows.data) + offset, hidden);
  const T* residual_row = static_cast<const T*>(problem.residual.data) + __shfl_sync(kAllLanes, offset, 0);
  const T* branch_row = static_cast<const T*>(problem.branch.data) + __shfl_sync(kAllLanes, offset, 1);
  const EitherRow gate_row(problem.gate.rows.data, problem.gate.type, __shfl_sync(kAllLanes, offset, 2));
  T* sum_row = static_cast<T*>(problem.sum) + row * hidden;
  trigger_next_grid();
  grid_wait();
  for (int64_t column = static_cast<int64_t>(threadIdx.x) * kWidth - before<kWidth>(sum_row); column < hidden;
       column += blockDim.x * kWidth) {
    const Part<kWidth> part(column, hidden);
    const auto residual = load_part(residual_row, part), branch = load_part(branch_row, part);
    float sum[kWidth], product[kWidth], gate[kWidth];
    gate_row.load<T>(part, 0.0f, gate);
    decode_all(residual.elements, sum);
    decode_all(branch.elements, product);
    add_gated<T>(product, gate, problem.stepwise, sum);
    store_part(sum_row, part, encode_all<T>(sum));
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    gate_backward_kernel(const __grid_constant__ GateBackwardLines problem, Tiles tiles) {
  __shared__ float sums_of_rows[kBackwardThreads * kWidth];
  const uint32_t part = blockIdx.x / tiles.in_a_row;  // of all groups
  const uint32_t group = part / problem.parts;
  const int own = threadIdx.x % tiles.columns;
  const int64_t column = (static_cast<int64_t>(blockIdx.x % tiles.in_a_row) * tiles.columns + own) * kWidth;
  const uint32_t end = column < problem.hidden ? problem.rows : 0;
  const uint32_t step = problem.parts * tiles.rows;
  float gate[kWidth], sums[kWidth] = {};
  const auto read_gate = [&](uint32_t index) {
    load_either<T, kWidth>(problem.gate.data, problem.gate_type, index * problem.gate.span_stride + column, gate);
  };
  const uint32_t first_row = (part - group * problem.parts) * tiles.rows + threadIdx.x / tiles.columns;
  if (own == 0) {
    const int64_t elements = min(static_cast<int64_t>(tiles.columns) * kWidth, problem.hidden - column);
    for (uint32_t row = first_row; row < min(end, first_row + kBackwardRows * step); row += step) {
      prefetch_row_to_l2(problem.grad.at<T>(group, row) + column, elements);
      if (problem.branch.data != nullptr) prefetch_row_to_l2(problem.branch.at<T>(group, row) + column, elements);
    }
  }
  grid_wait();
  trigger_next_grid();
  if (problem.shared_gate && end > 0) read_gate(group);
  for (uint32_t first = first_row; first < end; first += step * kBackwardRows) {
    Vector<T, kWidth> grad[kBackwardRows], branch[kBackwardRows];
#pragma unroll
    for (int i = 0; i < kBackwardRows; ++i) {
      const uint32_t row = min(first + i * step, end - 1);
      grad[i] = load<T, kWidth>(problem.grad.at<T>(group, row) + column);
      if (problem.branch.data != nullptr) {
        branch[i] = load<T, kWidth>(problem.branch.at<T>(group, row) + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kBackwardRows; ++i) {
      const uint32_t row = first + i * step;
      if (row >= end) break;
      const int64_t index = (static_cast<int64_t>(group) * problem.rows + row) * problem.hidden + column;
      if (!problem.shared_gate) read_gate(row);
      float slope[kWidth];
      decode_all(grad[i].elements, slope);
      if (problem.branch.data != nullptr) {
        float product[kWidth];
        decode_all(branch[i].elements, product);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          product[j] *= slope[j];
          sums[j] += product[j];
        }
        if (problem.partial == nullptr) store_either<T, kWidth>(problem.grad_gate, problem.gate_type, index, product);
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) slope[j] *= gate[j];
      store(static_cast<T*>(problem.grad_branch) + index, encode_all<T>(slope));
    }
  }
  if (problem.partial == nullptr) return;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) sums_of_rows[threadIdx.x * kWidth + j] = sums[j];
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= tiles.columns || column >= problem.hidden) return;
  for (int i = 1; i < tiles.rows; ++i) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sums[j] += sums_of_rows[(i * tiles.columns + own) * kWidth + j];
  }
  store_floats(problem.partial + part * problem.hidden + column, sums);
}

// Rows wherever they lie: a thread has a column of a part of a group of so many rows. Where its next rows begin, the
// lanes of a warp find for one another.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    gate_backward_any_kernel(const __grid_constant__ GateBackward problem, int64_t rows, unsigned in_a_row) {
  const Sums& sums = problem.sums;
  const uint32_t part = blockIdx.x / in_a_row, parts = static_cast<uint32_t>(sums.parts), group = part / parts;
  const int64_t column = static_cast<int64_t>(blockIdx.x % in_a_row) * kThreads + threadIdx.x;
  const int64_t end = (group + 1) * rows, column_read = min(column, problem.hidden - 1);
  const bool there = column < problem.hidden, product_asked = problem.grad_gate != nullptr;
  const int lane = threadIdx.x % kWarp, row_of_lane = lane % kAnyRows, tensor = lane / kAnyRows;
  float sum = 0.0f;
  for (int64_t row = group * rows + part % parts; row < end; row += kAnyRows * parts) {
    const int64_t own = min(row + row_of_lane * parts, end - 1);
    const Rows& own_rows = tensor == 0 ? problem.grad : tensor == 1 ? problem.branch : problem.gate.rows;
    const int64_t offset = own_rows.offset(tensor > 1 && problem.span > 1 ? group : own);
    const auto offset_of = [&](int index, int i) {
      return __shfl_sync(kAllLanes, offset, index * kAnyRows + i) + column_read;
    };
    float slopes[kAnyRows], products[kAnyRows], gates[kAnyRows][1];
#pragma unroll
    for (int i = 0; i < kAnyRows; ++i) {
      slopes[i] = decode(static_cast<const T*>(problem.grad.data)[offset_of(0, i)]);
      const int64_t branch_at = offset_of(1, i);
      products[i] = product_asked ? decode(static_cast<const T*>(problem.branch.data)[branch_at]) : 0.0f;
      load_either<T, 1>(problem.gate.rows.data, problem.gate.type, offset_of(2, i), gates[i]);
    }
#pragma unroll
    for (int i = 0; i < kAnyRows; ++i) {
      if (!there || row + i * parts >= end) break;
      const int64_t index = (row + i * parts) * problem.hidden + column;
      static_cast<T*>(problem.grad_branch)[index] = encode<T>(slopes[i] * gates[i][0]);
      const float product[1] = {slopes[i] * products[i]};
      sum += product[0];
      if (product_asked && sums.partial == nullptr) {
        store_either<T, 1>(problem.grad_gate, problem.gate.type, index, product);
      }
    }
  }
  if (there && sums.partial != nullptr) sums.partial[part * problem.hidden + column] = sum;
}

template <typename T>
cudaError_t launch(const Gate& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  Lines residual, branch, gate;
  if (problem.hidden % kWidth == 0 && aligned(problem.residual, sizeof(T)) && aligned(problem.branch, sizeof(T)) &&
      aligned(problem.gate) && aligned(problem.sum) && problem.rows < INT32_MAX &&
      lines_of(problem.residual, problem.span, &residual) && lines_of(problem.branch, problem.span, &branch) &&
      lines_of(problem.gate, &gate)) {
    const GateLines lines{residual,
                          branch,
                          gate,
                          problem.gate.type,
                          problem.sum,
                          static_cast<uint32_t>(problem.rows),
                          static_cast<uint32_t>(problem.span),
                          problem.hidden,
                          Divider(static_cast<uint32_t>(problem.span)),
                          problem.stepwise,
                          ask_early(problem.rows * problem.hidden * int64_t{3 * sizeof(T)})};
    const Tiles tiles = tiles_of(problem.hidden, kWidth, kThreads);
    const auto blocks = static_cast<unsigned>((problem.rows + tiles.rows - 1) / tiles.rows * tiles.in_a_row);
    return launch_with_pdl(gate_kernel<T, kWidth>, dim3(blocks), dim3(tiles.columns * tiles.rows), 0, stream, lines,
                           tiles);
  }
  // One vector more than in a row of whole ones, for the row may begin within one.
  const int64_t vectors = problem.hidden / kWidth + 2, rounds = (vectors + kThreads - 1) / kThreads;
  const int64_t threads = ((vectors + rounds - 1) / rounds + kWarp - 1) / kWarp * kWarp;
  return launch_in_parts(problem.rows, problem.span, [&](unsigned blocks, const First& first) {
    return launch_with_pdl(gate_any_kernel<T>, dim3(blocks), dim3(static_cast<unsigned>(threads)), 0, stream, problem,
                           first);
  });
}

template <typename T>
cudaError_t launch(const GateBackward& problem, cudaStream_t stream) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const int64_t rows = problem.rows / problem.sums.groups, parts = problem.sums.groups * problem.sums.parts;
  Lines grad, branch, gate;
  if (problem.hidden % kWidth == 0 && aligned(problem.grad, sizeof(T)) && aligned(problem.branch, sizeof(T)) &&
      aligned(problem.gate) && aligned(problem.grad_branch) && aligned(problem.grad_gate) && problem.rows < INT32_MAX &&
      lines_of(problem.grad, rows, &grad) && lines_of(problem.branch, rows, &branch) && lines_of(problem.gate, &gate)) {
    if (problem.grad_gate == nullptr) branch.data = nullptr;
    const GateBackwardLines lines{grad,
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
    const Tiles tiles = tiles_of(problem.hidden, kWidth, kBackwardThreads);
    const auto blocks = static_cast<unsigned>(parts * tiles.in_a_row);
    launch_with_pdl(gate_backward_kernel<T, kWidth>, dim3(blocks), dim3(tiles.columns * tiles.rows), 0, stream, lines,
                    tiles);
  } else {
    const auto in_a_row = static_cast<unsigned>((problem.hidden + kThreads - 1) / kThreads);
    gate_backward_any_kernel<T>
        <<<static_cast<unsigned>(parts) * in_a_row, kThreads, 0, stream>>>(problem, rows, in_a_row);
  }
  return cudaGetLastError();
}

}  // namespace

int gate(const Gate& problem, void* stream) {
  cudaError_t error = cudaSuccess;
  dispatch_dtype(problem.type, [&](auto tag) {
    error = launch<typename decltype(tag)::Element>(problem, static_cast<cudaStream_t>(stream));
  });
  return error;
}

int partial_sums(const GateBackward& problem, int64_t* parts) {
  int processors;
  const cudaError_t error = sm_count(&processors);
  if (error != cudaSuccess) return error;
  const Tiles tiles =
      tiles_of(problem.hidden, kVectorBytes / static_cast<int>(bytes_of(problem.type)), kBackwardThreads);
  const int64_t at_once = static_cast<int64_t>(tiles.rows) * kBackwardRows, groups = problem.sums.groups;
  const int64_t blocks = std::max<int64_t>(1, kBackwardBlocks * processors / tiles.in_a_row);
  const int64_t most = (problem.rows / groups + at_once - 1) / at_once;
  *parts = std::max<int64_t>(1, std::min(blocks / groups, most));
  return cudaSuccess;
}

int gate_backward(const GateBackward& problem, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaSuccess;
  dispatch_dtype(problem.type,
                 [&](auto tag) { error = launch<typename decltype(tag)::Element>(problem, cuda_stream); });
  if (error != cudaSuccess || problem.sums.partial == nullptr) return error;
  Reduction reduction{};
  reduction.hidden = problem.hidden;
  reduction.sums = problem.sums;
  reduction.add(problem.grad_gate, problem.gate.type, false, {0, {}});
  return reduce(reduction, cuda_stream);
}

}  // namespace adaln
