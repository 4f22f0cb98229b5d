// RMSNorm, forward: the kernels' arguments, and the operations on one vector of elements.
//
// Reads:    nothing of its own.
// Writes:   vectors of `normed`.
// Must not: depend on the mapping of rows to threads.
#pragma once

#include "kit/launch.cuh"
#include "rmsnorm_cuda/device.cuh"

namespace rmsnorm {

constexpr uint8_t kWholeBlock = 255;  // in place of log2_lanes: all threads of the block share a row

// The columns of a row of the launch table that a kernel is compiled for. Rows that agree in them share a kernel.
// kLog2Lanes: as fixed_log2_lanes returns it.
template <bool kRowPerBlock_, int kThreads_, int kLog2Lanes_, int kVectors_, unsigned kEarlyTriggerBlocks_>
struct ForwardConfig {
  static constexpr bool kRowPerBlock = kRowPerBlock_;
  static constexpr int kThreads = kThreads_, kLog2Lanes = kLog2Lanes_, kVectors = kVectors_;
  static constexpr unsigned kEarlyTriggerBlocks = kEarlyTriggerBlocks_;
};

// Fast path: rows are evenly strided; weight and results have x's dtype. With few rows, the wait for the parameters is
// a large part of a kernel's time, so the parameters that every launch needs fit in one 64-byte cache line.
struct alignas(64) FastForwardArguments {
  const void* x;
  void* normed;
  Weight weight;
  int64_t x_stride, normed_stride;
  float inverse_of_hidden, eps;
  int hidden;          // of rows that registers hold
  uint8_t log2_lanes;  // lanes that share a row, where a block has several rows
  bool rounded_before_weight;
  bool exceeds_l2;  // the call moves more bytes than the launch configuration's threshold
  int64_t rows;
  int64_t prefetch_distance;  // in rows
  void* sum;
  const void* residual;
  int64_t residual_stride, sum_stride;
  unsigned prefetch_blocks;  // the first blocks of the grid, which prefetch
};

struct ForwardArguments : FastForwardArguments {
  bool fast;             // the fast path's conditions hold
  bool strided;          // the rows of x or of the residual have more than one dimension
  bool float32_results;  // `normed` is float32, x is not
  bool in_place;         // results overwrite x and the residual
  int64_t long_hidden;
  Rows x_rows, residual_rows;
};

// Offsets of a row's first element in each tensor.
template <bool kAdd>
struct ForwardOffsets {
  int64_t x, residual, normed, sum;
  __device__ __forceinline__ ForwardOffsets(const FastForwardArguments& arguments, int64_t row) {
    x = row * arguments.x_stride;
    normed = row * arguments.normed_stride;
    if (kAdd) {
      residual = row * arguments.residual_stride;
      sum = row * arguments.sum_stride;
    }
  }
  __device__ __forceinline__ ForwardOffsets(const ForwardArguments& arguments, int64_t row)
      : ForwardOffsets(static_cast<const FastForwardArguments&>(arguments), row) {
    if (!arguments.strided) return;
    x = arguments.x_rows.offset(row);
    if (kAdd) residual = arguments.residual_rows.offset(row);
    if (kAdd && arguments.in_place) {
      normed = x;
      sum = residual;
    }
  }
};

// Prefetches a row, or, if the call exceeds the L2 cache, of a later row, which another block reads.
template <typename T, bool kAdd, typename Arguments>
__device__ __forceinline__ void prefetch_row(const Arguments& arguments, int64_t row) {
  row += arguments.prefetch_distance;
  if (row >= arguments.rows) return;
  const ForwardOffsets<kAdd> offsets(arguments, row);
  prefetch_row_to_l2(static_cast<const T*>(arguments.x) + offsets.x, arguments.hidden);
  if (kAdd) prefetch_row_to_l2(static_cast<const T*>(arguments.residual) + offsets.residual, arguments.hidden);
}

template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> add(const Vector<T, kWidth>& a, const Vector<T, kWidth>& b) {
  float sums[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[i] = decode(a, i) + decode(b, i);
  return encode_all<T>(sums);
}

template <typename T, int kWidth>
__device__ __forceinline__ float sum_of_squares(const Vector<T, kWidth>& vector) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum += decode(vector, i) * decode(vector, i);
  return sum;
}

template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> norm(const Vector<T, kWidth>& vector, float rstd,
                                                  const float (&factors)[kWidth], bool rounded) {
  float values[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = decode(vector, i) * rstd;
  if (rounded) {
    const auto quotients = encode_all<T>(values);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = decode(quotients, i);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] *= factors[i];
  return encode_all<T>(values);
}

// Stores evict-first, unless the call exceeds the L2 cache.
template <typename T, int kWidth>
__device__ __forceinline__ void store_result(const FastForwardArguments& arguments, T* to,
                                             const Vector<T, kWidth>& vector) {
  if (arguments.exceeds_l2) {
    store(to, vector);
  } else {
    store_streaming(to, vector);
  }
}

// Stores a vector of `normed` for any arguments, float32 results included.
template <typename T, int kWidth>
__device__ __forceinline__ void store_norm(const ForwardArguments& arguments, int64_t offset, Vector<T, kWidth>& vector,
                                           float rstd, const float (&factors)[kWidth]) {
  const bool rounded = sizeof(T) < sizeof(float) && arguments.rounded_before_weight;
  if (sizeof(T) < sizeof(float) && arguments.float32_results) {
    float values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = decode(vector, i) * rstd;
    const auto quotients = encode_all<T>(values);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = decode(quotients, i) * factors[i];
    store_floats(static_cast<float*>(arguments.normed) + offset, values);
  } else {
    store_result(arguments, static_cast<T*>(arguments.normed) + offset, norm(vector, rstd, factors, rounded));
  }
}

}  // namespace rmsnorm
