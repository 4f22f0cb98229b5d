// RMSNorm, backward: the kernels' arguments, the operations on a row, a vector and a block's sums, and the general
// kernel, for rows that neither registers nor shared memory hold.
//
// Reads:    the weight; the general kernel x, grad and the weight twice, the second time from a cache, grad_sum once.
// Writes:   a block's partial sums of the gradient of the weight, or that gradient itself when there is one block; the
//           general kernel `grad_x`.
// Must not: use atomics; assume any alignment for kWidth = 1.
//
// A row is read by a group of threads; a block has several groups, each with a row at a time.
#pragma once

#include "kit/launch.cuh"
#include "rmsnorm_cuda/device.cuh"

namespace rmsnorm {

struct alignas(64) BackwardArguments {
  const void *x, *grad;
  void* grad_x;
  Weight weight;
  int64_t rows;
  float inverse_of_hidden, eps;
  int hidden;    // of rows that a group holds
  int group;     // threads of a group
  bool strided;  // the rows of x, grad or grad_sum have more than one dimension
  int64_t x_stride, grad_stride, grad_sum_stride;
  const void* grad_sum;  // null: absent
  float* partial;
  void* grad_weight;  // not null: of x's dtype, and written by the only block instead of `partial`
  int64_t long_hidden;
  Rows x_rows, grad_rows, grad_sum_rows;
};

// Offsets of a row's first element in each tensor.
struct BackwardOffsets {
  int64_t x, grad, grad_sum;
  __device__ __forceinline__ BackwardOffsets(const BackwardArguments& arguments, int64_t row) {
    x = row * arguments.x_stride;
    grad = row * arguments.grad_stride;
    grad_sum = row * arguments.grad_sum_stride;
    if (arguments.strided) {
      x = arguments.x_rows.offset(row);
      grad = arguments.grad_rows.offset(row);
      grad_sum = arguments.grad_sum_rows.offset(row);
    }
  }
};

// Sums over a group: up to a warp of threads, a power of two, or several warps, which then use a named barrier of their
// own. All threads of a group call this together and get the same sums. All groups of a block call it equally often:
// for ROCm, a barrier is that of the block.
class GroupSums {
 public:
  using Scratch = float2[2][kMaxBlockThreads / kWarp];

  __device__ __forceinline__ GroupSums(Scratch& scratch, int group, int index)
      : scratch_(scratch), group_(group), index_(index) {}

  __device__ __forceinline__ void operator()(float (&sums)[2]) {
    sum_over_lanes(sums, group_ < kWarp ? group_ : kWarp);
    if (group_ <= kWarp) return;
    const int warps = group_ / kWarp;
    float2* scratch = scratch_[half_];
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = make_float2(sums[0], sums[1]);
    synchronize_warps(index_, group_);
    scratch += index_ * warps;
    sums[0] = sums[1] = 0.0f;
    for (int i = 0; i < warps; ++i) {
      sums[0] += scratch[i].x;
      sums[1] += scratch[i].y;
    }
    half_ ^= 1;  // the next call may write while a slow warp still reads
  }

 private:
  Scratch& scratch_;
  int group_, index_, half_ = 0;
};

// The two values of a row that its gradients need: grad_x = rstd * grad * weight - x * projection.
struct RowGradient {
  float rstd, projection;
  __device__ __forceinline__ RowGradient(const BackwardArguments& arguments, const float (&sums)[2]) {
    rstd = reciprocal_norm(sums[0], arguments.inverse_of_hidden, arguments.eps);
    // In this order no product leaves the range of float32 before the result does.
    projection = sums[1] * arguments.inverse_of_hidden * rstd * rstd * rstd;
  }
};

// Adds to the row's sums of x^2 and of x * grad * weight.
template <typename T, int kWidth>
__device__ __forceinline__ void add_to_sums(const Vector<T, kWidth>& x, const Vector<T, kWidth>& grad,
                                            const float (&factors)[kWidth], float (&sums)[2]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float value = decode(x, j);
    sums[0] += value * value;
    sums[1] += value * (decode(grad, j) * factors[j]);
  }
}

// Returns a vector of grad_x, and adds the vector's share of the weight's gradient to `weight_sums`.
template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> gradient(const Vector<T, kWidth>& x, const Vector<T, kWidth>& grad,
                                                      const float (&factors)[kWidth], const RowGradient& row, bool add,
                                                      const Vector<T, kWidth>& grad_sum, float (&weight_sums)[kWidth]) {
  float results[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float value = decode(x, j);
    const float scaled = decode(grad, j) * row.rstd;
    weight_sums[j] += scaled * value;
    results[j] = scaled * factors[j] - value * row.projection;
  }
  if (add) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) results[j] += decode(grad_sum, j);
  }
  return encode_all<T>(results);
}

// Loads weights from any column, float32 or of the rows' dtype, all in flight at once; ones where not `in_range`.
template <typename T, int kWidth>
__device__ __forceinline__ void load_weights(const Weight& weight, int column, bool in_range, float (&values)[kWidth]) {
  const bool row_dtype = sizeof(T) == sizeof(float) || weight.type != Type::float32;
  T encoded[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    values[i] = 1.0f;
    encoded[i] = encode<T>(1.0f);
    if (in_range && row_dtype) encoded[i] = static_cast<const T*>(weight.data)[column + i];
    if (in_range && !row_dtype) values[i] = static_cast<const float*>(weight.data)[column + i];
  }
  if (!row_dtype) return;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = decode(encoded[i]);
}

// Writes the column sums of a block's only group from registers, for aligned rows. With eight columns per thread,
// neighbouring threads exchange halves first, so that each of a warp's stores covers whole 32-byte sectors.
template <typename T, int kWidth, int kVectors>
__device__ __forceinline__ void write_partial_of_group(const BackwardArguments& arguments, int first_column, int step,
                                                       const float (&weight_sums)[kVectors][kWidth]) {
  const int hidden = arguments.hidden;
  float* const partial = arguments.partial + static_cast<int64_t>(blockIdx.x) * hidden;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = first_column + i * step;
    if (arguments.grad_weight != nullptr) {
      if (column < hidden) store(static_cast<T*>(arguments.grad_weight) + column, encode_all<T>(weight_sums[i]));
    } else if constexpr (kWidth <= 4) {
      if (column < hidden) store_floats(partial + column, weight_sums[i]);
    } else {
      constexpr int kHalf = kWidth / 2;
      const bool odd = threadIdx.x % 2 != 0;
      float lower[kHalf], upper[kHalf];  // halves of the even and of the odd thread's columns
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
        const float first = weight_sums[i][j], second = weight_sums[i][j + kHalf];
        const float received = shuffle_xor(odd ? first : second, 1);
        lower[j] = odd ? received : first;
        upper[j] = odd ? second : received;
      }
      const int even_column = odd ? column - kWidth : column;
      float* const to = partial + even_column + (odd ? kHalf : 0);
      if (even_column < hidden) store_floats(to, lower);
      if (even_column + kWidth < hidden) store_floats(to + kWidth, upper);
    }
  }
}

// Adds up the column sums of a block's groups, in the order of the groups, and writes the totals. Shared memory holds a
// row of sums for each group. Eight groups are added at a time, so that no float32 sum has many terms.
template <typename T, int kWidth, int kVectors>
__device__ __forceinline__ void write_partial(const BackwardArguments& arguments, float* shared, int index,
                                              int first_column, int step,
                                              const float (&weight_sums)[kVectors][kWidth]) {
  constexpr int kEach = 4, kTogether = 8;
  const int hidden = arguments.hidden, groups = blockDim.x / arguments.group;
  float* const own = shared + index * hidden;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = first_column + i * step;
    if (column >= hidden) continue;
#pragma unroll
    for (int j = 0; j < kWidth; j += kEach) {
      using Floats = Vector<float, kEach>;
      *reinterpret_cast<Floats*>(own + column + j) = *reinterpret_cast<const Floats*>(&weight_sums[i][j]);
    }
  }
  __syncthreads();
  float* const partial = arguments.partial + static_cast<int64_t>(blockIdx.x) * hidden;
  for (int column = threadIdx.x * kEach; column < hidden; column += blockDim.x * kEach) {
    float sums[kEach] = {};
    for (int first = 0; first < groups; first += kTogether) {
      float some[kEach] = {};
      for (int group = first; group < first + kTogether && group < groups; ++group) {
        float more[kEach];
        load_floats(shared + group * hidden + column, more);
#pragma unroll
        for (int i = 0; i < kEach; ++i) some[i] += more[i];
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) sums[i] += some[i];
    }
    if (arguments.grad_weight != nullptr) {
      store(static_cast<T*>(arguments.grad_weight) + column, encode_all<T>(sums));
    } else {
      store_floats(partial + column, sums);
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxBlockThreads)
    backward_general_kernel(const __grid_constant__ BackwardArguments arguments) {
  __shared__ GroupSums::Scratch scratch;
  GroupSums sum_over_block(scratch, kMaxBlockThreads, 0);
  const int64_t hidden = arguments.long_hidden, step = kMaxBlockThreads * kWidth;
  const int64_t first_column = static_cast<int64_t>(threadIdx.x) * kWidth;
  float* partial = arguments.partial == nullptr ? nullptr : arguments.partial + blockIdx.x * hidden;
  grid_wait();
  trigger_next_grid();
  for (int64_t row = blockIdx.x; row < arguments.rows; row += gridDim.x) {
    const BackwardOffsets offsets(arguments, row);
    const T* x = static_cast<const T*>(arguments.x) + offsets.x;
    const T* grad = static_cast<const T*>(arguments.grad) + offsets.grad;
    float sums[2] = {0.0f, 0.0f};
    for (int64_t column = first_column; column < hidden; column += step) {
      Factors<T, kWidth> factors;
      factors.load_weight(arguments.weight, column);
      float values[kWidth];
      factors.get(arguments.weight, column, values);
      add_to_sums(load<T, kWidth>(x + column), load<T, kWidth>(grad + column), values, sums);
    }
    sum_over_block(sums);
    const RowGradient row_gradient(arguments, sums);
    T* grad_x = static_cast<T*>(arguments.grad_x) + row * hidden;
    const T* grad_sum =
        arguments.grad_sum == nullptr ? nullptr : static_cast<const T*>(arguments.grad_sum) + offsets.grad_sum;
    for (int64_t column = first_column; column < hidden; column += step) {
      Factors<T, kWidth> factors;
      factors.load_weight(arguments.weight, column);
      float values[kWidth], weight_sums[kWidth] = {};
      factors.get(arguments.weight, column, values);
      // A thread has the same columns in every row.
      if (partial != nullptr && row != blockIdx.x) load_floats(partial + column, weight_sums);
      Vector<T, kWidth> other{};
      if (grad_sum != nullptr) other = load<T, kWidth>(grad_sum + column);
      store(grad_x + column, gradient(load<T, kWidth>(x + column), load<T, kWidth>(grad + column), values, row_gradient,
                                      grad_sum != nullptr, other, weight_sums));
      if (partial != nullptr) store_floats(partial + column, weight_sums);
    }
  }
}

}  // namespace rmsnorm
