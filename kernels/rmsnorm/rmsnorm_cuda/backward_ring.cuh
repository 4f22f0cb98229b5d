// RMSNorm, backward: rows that pass through a ring buffer in shared memory.
//
// Reads:    x, grad, grad_sum and the weight, each once.
// Writes:   `grad_x`, and `partial` when the gradient of the weight is requested; with one block and kFast the gradient
//           itself instead.
// Must not: use atomics; read past the end of a tensor.
//
// Each group of threads has a ring buffer of its own. cp.async fills it without registers, so that enough loads are in
// flight and a row waits for none of its tensors. A thread copies and reads its own vectors only. The ends of a row
// (the aligned vectors that contain its head and its tail) are copied by one thread each and read by others.
//
// Rows are taken from the last to the first: the last ones are still L2-resident when the forward pass or the producer
// of grad has just ended.
#pragma once

#include "rmsnorm_cuda/backward.cuh"

namespace rmsnorm {

constexpr int kRowEnds = 2;  // head and tail

// The columns of a row of the launch table that a ring kernel is compiled for. Rows that agree in them share a kernel.
template <int kThreads_, int kVectors_, int kStages_, int kManyIterations_>
struct RingConfig {
  static constexpr int kThreads = kThreads_, kVectors = kVectors_, kStages = kStages_;
  static constexpr int kManyIterations = kManyIterations_;
};

// The columns that a thread of a group takes from each row.
//
// kFast: rows are aligned; the weight is aligned and of their dtype, or absent. Otherwise all rows of the block have
// one misalignment, the same in all tensors.
template <typename T, bool kFast>
struct RowSlice {
  static constexpr int kWidth = kVectorBytes / sizeof(T);

  // Elements between a row's start and the aligned address before it; the number of elements of the head; the column
  // after the last vector.
  int misalignment = 0, head = 0, end;
  int thread, hidden, first_column, column_step;

  __device__ __forceinline__ RowSlice(const BackwardArguments& arguments, int64_t row, int thread)
      : end(arguments.hidden), thread(thread), hidden(arguments.hidden) {
    if constexpr (!kFast) {
      const auto address =
          reinterpret_cast<uintptr_t>(static_cast<const T*>(arguments.x) + BackwardOffsets(arguments, row).x);
      misalignment = static_cast<int>(address / sizeof(T) % kWidth);
      head = min((kWidth - misalignment) % kWidth, hidden);
      end = head + (hidden - head) / kWidth * kWidth;
    }
    first_column = head + thread * kWidth;
    column_step = arguments.group * kWidth;
  }

  // The column of the head's or tail's element that this thread takes; negative: none.
  __device__ __forceinline__ int end_column() const {
    if (kFast || thread >= kRowEnds * kWidth) return -1;
    const int column = thread < kWidth ? thread - misalignment : end + thread - kWidth;
    return column < (thread < kWidth ? head : hidden) ? column : -1;
  }

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
    if constexpr (!kFast) {
      prefetch_row_to_l2(static_cast<const T*>(arguments.x) + offsets.x, hidden);
      prefetch_row_to_l2(static_cast<const T*>(arguments.grad) + offsets.grad, hidden);
      if (add) prefetch_row_to_l2(static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum, hidden);
    } else {
      const int64_t bytes = hidden * sizeof(T);
      prefetch_to_l2(static_cast<const T*>(arguments.x) + offsets.x, bytes);
      prefetch_to_l2(static_cast<const T*>(arguments.grad) + offsets.grad, bytes);
      if (add) prefetch_to_l2(static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum, bytes);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && arguments.weight.data != nullptr) {
    if (!kFast && arguments.weight.type == Type::float32) {
      prefetch_row_to_l2(static_cast<const float*>(arguments.weight.data), hidden);
    } else {
      prefetch_row_to_l2(static_cast<const T*>(arguments.weight.data), hidden);
    }
  }
}

template <typename T>
__device__ __forceinline__ void load_end_factor(const Weight& weight, EndElement& element) {
  load_weights<T>(weight, element.column, weight.data != nullptr && element.column >= 0, element.factor);
  element.factor[0] += weight.offset;
}

// A thread's element of a row's head or tail, in each tensor.
template <typename T>
struct EndVectors {
  Vector<T, 1> x, grad, grad_sum{};
};

// Stores grad_x for that element, and adds to its sum of the weight's gradient.
template <typename T>
__device__ __forceinline__ void store_end(const RowGradient& row, const EndVectors<T>& ends, bool add,
                                          EndElement& element, T* grad_x) {
  store(grad_x + computed_here(element.column),
        gradient(ends.x, ends.grad, element.factor, row, add, ends.grad_sum, element.weight_sum));
}

// A thread's view of its group's ring buffer.
template <typename Config, typename T, bool kFast>
class RingBuffer {
 public:
  static constexpr int kWidth = kVectorBytes / sizeof(T), kVectors = Config::kVectors;

  __device__ __forceinline__ RingBuffer(float4* memory, int tensors, int groups, int index)
      : memory_(memory), tensors_(tensors), groups_(groups), index_(index), own_(memory + threadIdx.x) {}

  // The current stage's copy of this thread's i-th vector of a tensor.
  __device__ __forceinline__ T* vector(int tensor, int i) const {
    return reinterpret_cast<T*>(own_ + (tensor * kVectors + i) * blockDim.x);
  }

  // The current stage's copy of the vectors with the group's head and tail.
  __device__ __forceinline__ T* ends(int tensor) const {
    float4* const all = memory_ + Config::kStages * tensors_ * kVectors * blockDim.x;
    return reinterpret_cast<T*>(all + ((stage_ * groups_ + index_) * tensors_ + tensor) * kRowEnds);
  }

  // Loads the thread's element of the head or tail.
  __device__ __forceinline__ void load_ends(int thread, bool add, EndVectors<T>& vectors) const {
    vectors.x = load<T, 1>(ends(0) + thread);
    vectors.grad = load<T, 1>(ends(1) + thread);
    if (add) vectors.grad_sum = load<T, 1>(ends(2) + thread);
  }

  // Starts the copies of a row into the current stage.
  __device__ __forceinline__ void copy(const BackwardArguments& arguments, const RowSlice<T, kFast>& slice,
                                       int element_column, int64_t row) const {
    const bool add = arguments.grad_sum != nullptr;
    const BackwardOffsets offsets(arguments, row);
    const T* const x = static_cast<const T*>(arguments.x) + offsets.x + slice.first_column;
    const T* const grad = static_cast<const T*>(arguments.grad) + offsets.grad + slice.first_column;
    const T* const grad_sum = static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum + slice.first_column;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (slice.column(i) < slice.end) {
        cp_async(reinterpret_cast<uint4*>(vector(0, i)), x + i * slice.column_step);
        cp_async(reinterpret_cast<uint4*>(vector(1, i)), grad + i * slice.column_step);
        if (add) cp_async(reinterpret_cast<uint4*>(vector(2, i)), grad_sum + i * slice.column_step);
      }
    }
    if constexpr (!kFast) {
      const bool last = row == arguments.rows - 1;
      copy_ends(slice, element_column, 0, x, last);
      copy_ends(slice, element_column, 1, grad, last);
      if (add) copy_ends(slice, element_column, 2, grad_sum, last);
    }
  }

  __device__ __forceinline__ void advance() {
    own_ += tensors_ * kVectors * blockDim.x;
    if (++stage_ == Config::kStages) {
      stage_ = 0;
      own_ = memory_ + threadIdx.x;
    }
  }

 private:
  // `from`: the thread's first vector.
  __device__ __forceinline__ void copy_ends(const RowSlice<T, kFast>& slice, int element_column, int tensor,
                                            const T* from, bool last) const {
    if (last) {
      // There may be no memory after the last row.
      if (element_column >= 0) ends(tensor)[slice.thread] = from[element_column - slice.first_column];
    } else if (slice.thread < kRowEnds && (slice.thread == 0 ? slice.head > 0 : slice.end < slice.hidden)) {
      cp_async(reinterpret_cast<uint4*>(ends(tensor) + slice.thread * kWidth),
               from - slice.first_column + (slice.thread == 0 ? -slice.misalignment : slice.end));
    }
  }

  float4* const memory_;
  const int tensors_, groups_, index_;
  float4* own_;
  int stage_ = 0;
};

// The factors of a thread's vectors. With float32 weights, or unaligned ones, they are floats from the start.
template <typename Config, typename T, bool kFast>
struct RingFactors {
  static constexpr int kWidth = kVectorBytes / sizeof(T), kVectors = Config::kVectors;
  Factors<T, kWidth> factors[kVectors];
  float weights[kVectors][kWidth];

  __device__ __forceinline__ void load(const RowSlice<T, kFast>& slice, const Weight& weight) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = slice.column(i);
      if constexpr (!kFast) {
        load_weights<T>(weight, column, weight.data != nullptr && column < slice.end, weights[i]);
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
template <typename Config, typename T, bool kFast>
__device__ __forceinline__ void add_row_to_sums(const BackwardArguments& arguments, const RowSlice<T, kFast>& slice,
                                                const RingBuffer<Config, T, kFast>& ring,
                                                RingFactors<Config, T, kFast>& factors, int columns, float (&sums)[2]) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
#pragma unroll
  for (int i = 0; i < Config::kVectors; ++i) {
    const int column = slice.column(i);
    if (column < columns) {
      float values[kWidth];
      factors.get(arguments.weight, i, values);
      add_to_sums(load<T, kWidth>(ring.vector(0, i)), load<T, kWidth>(ring.vector(1, i)), values, sums);
    }
  }
}

// Returns the i-th vector of grad_x of a thread, and adds to its sums of the weight's gradient.
template <typename Config, typename T, bool kFast, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> gradient_of_vector(const RingBuffer<Config, T, kFast>& ring,
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
template <typename Config, typename T, bool kFast>
__global__ void __launch_bounds__(Config::kThreads)
    backward_ring_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr int kWidth = kVectorBytes / sizeof(T), kVectors = Config::kVectors, kStages = Config::kStages;
  __shared__ GroupSums::Scratch scratch;
  extern __shared__ float4 memory[];
  const bool add = arguments.grad_sum != nullptr;
  const int tensors = add ? 3 : 2;
  const int group = arguments.group, groups = blockDim.x / group, index = threadIdx.x / group;
  const int thread = threadIdx.x - index * group;
  const int64_t step = static_cast<int64_t>(gridDim.x) * groups;
  const int64_t first_row = arguments.rows - 1 - static_cast<int64_t>(blockIdx.x);  // of the block
  int64_t next = first_row - static_cast<int64_t>(gridDim.x) * index;
  const RowSlice<T, kFast> slice(arguments, first_row, thread);
  EndElement element{slice.end_column()};
  GroupSums sum_over_group(scratch, group, index);
  RingBuffer<Config, T, kFast> ring(memory, tensors, groups, index);
  prefetch_first<T, kFast>(arguments, next, thread);
  grid_wait();
  RingFactors<Config, T, kFast> factors;
  factors.load(slice, arguments.weight);
  if constexpr (!kFast) load_end_factor<T>(arguments.weight, element);
  float weight_sums[kVectors][kWidth] = {};
  int64_t row = next + step * kStages;
  const int64_t last_iterations = arguments.rows > Config::kManyIterations * step ? 2 : 1;
  for (int64_t iteration = -kStages; iteration * step < arguments.rows; ++iteration, row -= step, next -= step) {
    if ((iteration + last_iterations) * step >= arguments.rows) trigger_next_grid();
    const int columns = iteration >= 0 && row >= 0 ? slice.end : 0;
    cp_async_wait<kStages - 1>();
    float sums[2] = {0.0f, 0.0f};
    EndVectors<T> ends;
    const bool has_element = !kFast && iteration >= 0 && row >= 0 && element.column >= 0;
    if (!kFast) __syncwarp();  // one thread has copied the ends, others read them
    if (has_element) {
      ring.load_ends(thread, add, ends);
      add_to_sums(ends.x, ends.grad, element.factor, sums);
    }
    add_row_to_sums(arguments, slice, ring, factors, columns, sums);
    if (iteration >= 0) sum_over_group(sums);
    const RowGradient row_gradient(arguments, sums);
    T* const grad_x = static_cast<T*>(arguments.grad_x) + row * arguments.hidden;
    if (has_element) store_end(row_gradient, ends, add, element, grad_x);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (slice.column(i) < columns) {
        float values[kWidth];
        factors.get(arguments.weight, i, values);
        store(grad_x + computed_here(slice.column(i)),
              gradient_of_vector(ring, values, i, row_gradient, add, weight_sums[i]));
      }
    }
    if (!kFast) __syncwarp();  // before another thread overwrites the ends
    if (next >= 0) ring.copy(arguments, slice, element.column, next);
    cp_async_commit();
    ring.advance();
  }
  if (arguments.partial == nullptr) return;
  if (kFast && groups == 1) {
    write_partial_of_group<T>(arguments, slice.first_column, slice.column_step, weight_sums);
    return;
  }
  cp_async_wait<0>();
  write_partial<T, !kFast>(arguments, reinterpret_cast<float*>(memory), index, slice.first_column, slice.column_step,
                           slice.end, weight_sums, slice.misalignment, element);
}

}  // namespace rmsnorm
