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

// A vector of a row of any alignment. It may begin before the row and end after it; elements outside the row are read
// as zero and not written. It moves as a whole where it is aligned and inside the row, else element by element.
template <int kWidth>
struct RowWindow {
  int64_t column;  // of the row, where the vector begins; negative before it
  int begin, end;  // of the vector's elements inside the row

  __device__ __forceinline__ RowWindow(int64_t column, int64_t hidden)
      : column(column),
        begin(column < 0 ? static_cast<int>(-column) : 0),
        end(hidden - column < kWidth ? static_cast<int>(hidden - column) : kWidth) {}

  __device__ __forceinline__ bool has(int element) const { return element >= begin && element < end; }
  __device__ __forceinline__ bool whole() const { return begin == 0 && end == kWidth; }

  template <typename T>
  __device__ __forceinline__ bool is_vector(const T* row) const {
    constexpr size_t kBytes = sizeof(T) * kWidth < kVectorBytes ? sizeof(T) * kWidth : kVectorBytes;
    return whole() && reinterpret_cast<uintptr_t>(row + column) % kBytes == 0;
  }
};

template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> load_vector(const T* row, const RowWindow<kWidth>& window) {
  if (window.is_vector(row)) return load<T, kWidth>(row + window.column);
  Vector<T, kWidth> vector;
  if (window.whole()) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector.elements[i] = row[window.column + i];
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector.elements[i] = window.has(i) ? row[window.column + i] : encode<T>(0.0f);
  }
  return vector;
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_vector(T* row, const RowWindow<kWidth>& window, const Vector<T, kWidth>& vector) {
  if (window.is_vector(row)) return store(row + window.column, vector);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (window.has(i)) row[window.column + i] = vector.elements[i];
  }
}

// A row of T or float32, as modulations are.
class MixedRow {
 public:
  __device__ __forceinline__ MixedRow(const void* data, Type type, int64_t start)
      : data_(data), type_(type), start_(start) {}

  // `otherwise` where there is no such row.
  template <typename T, int kWidth>
  __device__ __forceinline__ void load(const RowWindow<kWidth>& window, float otherwise,
                                       float (&values)[kWidth]) const {
    if (data_ == nullptr) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i] = otherwise;
    } else if (sizeof(T) < sizeof(float) && type_ != Type::float32) {
      decode_all(load_vector(static_cast<const T*>(data_) + start_, window).elements, values);
    } else {
      const float* row = static_cast<const float*>(data_) + start_;
      if (window.is_vector(row)) return load_floats(row + window.column, values);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i] = window.has(i) ? row[window.column + i] : 0.0f;
    }
  }

 private:
  const void* data_;
  Type type_;
  int64_t start_ = 0;
};

// A block has a row. Its vectors are the aligned vectors of `sum`. The lanes of a warp share the search for the starts
// of the inputs' rows.
template <typename T, int kRow>
__global__ void __launch_bounds__(kGateTable[kRow].threads)
    gate_general_kernel(const __grid_constant__ Gate problem, FirstRow first) {
  if constexpr (!kInThisCode<kGateTable, kRow>) return;
  constexpr int kWidth = kVectorWidth<T>;
  const int lane = threadIdx.x % kWarp;
  const int64_t hidden = problem.hidden, row = first.row + blockIdx.x;
  const Rows& rows = lane == 0 ? problem.residual : lane == 1 ? problem.branch : problem.gate.rows;
  const int64_t offset = rows.offset(lane < 2 ? row : first.span + first.spans(blockIdx.x));
  if (threadIdx.x < 2) prefetch_row_to_l2(static_cast<const T*>(rows.data) + offset, hidden);
  const T* residual_row = static_cast<const T*>(problem.residual.data) + shuffle(offset, 0);
  const T* branch_row = static_cast<const T*>(problem.branch.data) + shuffle(offset, 1);
  const MixedRow gate_row(problem.gate.rows.data, problem.gate.type, shuffle(offset, 2));
  T* sum_row = static_cast<T*>(problem.sum) + row * hidden;
  trigger_next_grid();
  grid_wait();
  for (int64_t column = static_cast<int64_t>(threadIdx.x) * kWidth - misalignment_of<kWidth>(sum_row); column < hidden;
       column += blockDim.x * kWidth) {
    const RowWindow<kWidth> window(column, hidden);
    const auto residual = load_vector(residual_row, window), branch = load_vector(branch_row, window);
    float sum[kWidth], product[kWidth], gate[kWidth];
    gate_row.load<T>(window, 0.0f, gate);
    decode_all(residual.elements, sum);
    decode_all(branch.elements, product);
    add_gated<T>(product, gate, problem.stepwise, sum);
    store_vector(sum_row, window, encode_all<T>(sum));
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
