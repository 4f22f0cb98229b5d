// RMSNorm, backward: rows that pass through a ring buffer in shared memory.
//
// Reads:    x, grad, grad_sum and the weight, each once.
// Writes:   `grad_x`, and `partial` when the gradient of the weight is requested; with one block and kFast the gradient
//           itself instead.
// Must not: use atomics.
//
// Each group of threads has a ring buffer of its own. cp.async fills it without registers, so that enough loads are in
// flight and a row waits for none of its tensors. A thread copies and reads its own vectors only.
//
// kFast: the weight is aligned and of the rows' dtype, or absent.
//
// Rows are taken from the last to the first: the last ones are still L2-resident when the forward pass or the producer
// of grad has just ended.
#pragma once

#include "rmsnorm_cuda/backward.cuh"
#include "rmsnorm_cuda/launch_table.h"

namespace rmsnorm {

// The columns that a thread of a group takes from each row.
template <typename T>
struct RowSlice {
  static constexpr int kWidth = kVectorBytes / sizeof(T);

  int hidden, first_column, column_step;

  __device__ __forceinline__ RowSlice(const BackwardArguments& arguments, int thread)
      : hidden(arguments.hidden), first_column(thread * kWidth), column_step(arguments.group * kWidth) {}

  // The first column of the thread's i-th vector.
  __device__ __forceinline__ int column(int i) const { return first_column + i * column_step; }
};

// Prefetches a group's first row, by its first thread, and the weight.
template <typename T, bool kFast>
__device__ __forceinline__ void prefetch_first(const BackwardArguments& arguments, int64_t row, int thread) {
  const bool add = arguments.grad_sum != nullptr;
  const int hidden = arguments.hidden;
  if (thread == 0 && row >= 0) {
    const BackwardOffsets offsets(arguments, row);
    const int64_t bytes = hidden * sizeof(T);
    prefetch_to_l2(static_cast<const T*>(arguments.x) + offsets.x, bytes);
    prefetch_to_l2(static_cast<const T*>(arguments.grad) + offsets.grad, bytes);
    if (add) prefetch_to_l2(static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum, bytes);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && arguments.weight.data != nullptr) {
    if (!kFast && arguments.weight.type == Type::float32) {
      prefetch_row_to_l2(static_cast<const float*>(arguments.weight.data), hidden);
    } else {
      prefetch_row_to_l2(static_cast<const T*>(arguments.weight.data), hidden);
    }
  }
}

// A thread's view of its group's ring buffer. Here and below, kRow: of kBackwardLaunches.
template <int kRow, typename T>
class RingBuffer {
 public:
  static constexpr int kWidth = kVectorBytes / sizeof(T), kVectors = kBackwardLaunches[kRow].held;

  __device__ __forceinline__ RingBuffer(float4* memory, int tensors)
      : memory_(memory), tensors_(tensors), own_(memory + threadIdx.x) {}

  // The current stage's copy of this thread's i-th vector of a tensor.
  __device__ __forceinline__ T* vector(int tensor, int i) const {
    return reinterpret_cast<T*>(own_ + (tensor * kVectors + i) * blockDim.x);
  }

  // Starts the copies of a row into the current stage.
  __device__ __forceinline__ void copy(const BackwardArguments& arguments, const RowSlice<T>& slice,
                                       int64_t row) const {
    const bool add = arguments.grad_sum != nullptr;
    const BackwardOffsets offsets(arguments, row);
    const T* const x = static_cast<const T*>(arguments.x) + offsets.x + slice.first_column;
    const T* const grad = static_cast<const T*>(arguments.grad) + offsets.grad + slice.first_column;
    const T* const grad_sum = static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum + slice.first_column;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (slice.column(i) < slice.hidden) {
        cp_async(reinterpret_cast<uint4*>(vector(0, i)), x + i * slice.column_step);
        cp_async(reinterpret_cast<uint4*>(vector(1, i)), grad + i * slice.column_step);
        if (add) cp_async(reinterpret_cast<uint4*>(vector(2, i)), grad_sum + i * slice.column_step);
      }
    }
  }

  __device__ __forceinline__ void advance() {
    own_ += tensors_ * kVectors * blockDim.x;
    if (++stage_ == kBackwardLaunches[kRow].stages) {
      stage_ = 0;
      own_ = memory_ + threadIdx.x;
    }
  }

 private:
  float4* const memory_;
  const int tensors_;
  float4* own_;
  int stage_ = 0;
};

// The factors of a thread's vectors. Without kFast they are floats from the start.
template <int kRow, typename T, bool kFast>
struct RingFactors {
  static constexpr int kWidth = kVectorBytes / sizeof(T), kVectors = kBackwardLaunches[kRow].held;
  Factors<T, kWidth> factors[kVectors];
  float weights[kVectors][kWidth];

  __device__ __forceinline__ void load(const RowSlice<T>& slice, const Weight& weight) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = slice.column(i);
      if constexpr (!kFast) {
        load_weights<T>(weight, column, weight.data != nullptr && column < slice.hidden, weights[i]);
      } else {
        factors[i].load_weight_if(weight, column, weight.data != nullptr && column < slice.hidden);
      }
    }
  }

  __device__ __forceinline__ void get(const Weight& weight, int i, float (&values)[kWidth]) {
    if constexpr (kFast) {
      factors[i].make_opaque();
      factors[i].decode_loaded(weight, values);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] = weights[i][j] + weight.offset;
    }
  }
};

// Adds a thread's vectors of the current stage to the row's sums.
template <int kRow, typename T, bool kFast>
__device__ __forceinline__ void add_row_to_sums(const BackwardArguments& arguments, const RowSlice<T>& slice,
                                                const RingBuffer<kRow, T>& ring, RingFactors<kRow, T, kFast>& factors,
                                                int columns, float (&sums)[2]) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
#pragma unroll
  for (int i = 0; i < kBackwardLaunches[kRow].held; ++i) {
    const int column = slice.column(i);
    if (column < columns) {
      float values[kWidth];
      factors.get(arguments.weight, i, values);
      add_to_sums(load<T, kWidth>(ring.vector(0, i)), load<T, kWidth>(ring.vector(1, i)), values, sums);
    }
  }
}

// Returns the i-th vector of grad_x of a thread, and adds to its sums of the weight's gradient.
template <int kRow, typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> gradient_of_vector(const RingBuffer<kRow, T>& ring,
                                                                const float (&factors)[kWidth], int i,
                                                                const RowGradient& row, bool add,
                                                                float (&weight_sums)[kWidth]) {
  Vector<T, kWidth> other{};
  if (add) other = load<T, kWidth>(ring.vector(2, i));
  return gradient(load<T, kWidth>(ring.vector(0, i)), load<T, kWidth>(ring.vector(1, i)), factors, row, add, other,
                  weight_sums);
}

// All groups have the same number of iterations, since their warps reduce together. The first ones only fill the ring.
//
// The second kernel may start during the last iterations. An earlier trigger costs up to 10 % with wide rows and up to
// 5 % with few iterations (H100).
template <int kRow, typename T, bool kFast>
__global__ void __launch_bounds__(kBackwardLaunches[kRow].threads)
    backward_ring_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr BackwardLaunch kLaunch = kBackwardLaunches[kRow];
  constexpr int kWidth = kVectorBytes / sizeof(T), kVectors = kLaunch.held, kStages = kLaunch.stages;
  __shared__ GroupSums::Scratch scratch;
  extern __shared__ float4 memory[];
  const bool add = arguments.grad_sum != nullptr;
  const int tensors = add ? 3 : 2;
  const int group = arguments.group, groups = blockDim.x / group, index = threadIdx.x / group;
  const int thread = threadIdx.x - index * group;
  const int64_t step = static_cast<int64_t>(gridDim.x) * groups;
  const int64_t first_row = arguments.rows - 1 - static_cast<int64_t>(blockIdx.x);  // of the block
  int64_t next = first_row - static_cast<int64_t>(gridDim.x) * index;
  const RowSlice<T> slice(arguments, thread);
  GroupSums sum_over_group(scratch, group, index);
  RingBuffer<kRow, T> ring(memory, tensors);
  prefetch_first<T, kFast>(arguments, next, thread);
  grid_wait();
  RingFactors<kRow, T, kFast> factors;
  factors.load(slice, arguments.weight);
  float weight_sums[kVectors][kWidth] = {};
  int64_t row = next + step * kStages;
  const int64_t last_iterations = arguments.rows > kLaunch.many_iterations * step ? 2 : 1;
  for (int64_t iteration = -kStages; iteration * step < arguments.rows; ++iteration, row -= step, next -= step) {
    if ((iteration + last_iterations) * step >= arguments.rows) trigger_next_grid();
    const int columns = iteration >= 0 && row >= 0 ? slice.hidden : 0;
    cp_async_wait<kStages - 1>();
    float sums[2] = {0.0f, 0.0f};
    add_row_to_sums(arguments, slice, ring, factors, columns, sums);
    if (iteration >= 0) sum_over_group(sums);
    const RowGradient row_gradient(arguments, sums);
    T* const grad_x = static_cast<T*>(arguments.grad_x) + row * arguments.hidden;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (slice.column(i) < columns) {
        float values[kWidth];
        factors.get(arguments.weight, i, values);
        store(grad_x + computed_here(slice.column(i)),
              gradient_of_vector(ring, values, i, row_gradient, add, weight_sums[i]));
      }
    }
    if (next >= 0) ring.copy(arguments, slice, next);
    cp_async_commit();
    ring.advance();
  }
  if (arguments.partial == nullptr) return;
  if (groups == 1) {
    write_partial_of_group<T>(arguments, slice.first_column, slice.column_step, weight_sums);
    return;
  }
  cp_async_wait<0>();
  write_partial<T>(arguments, reinterpret_cast<float*>(memory), index, slice.first_column, slice.column_step,
                   weight_sums);
}

}  // namespace rmsnorm
