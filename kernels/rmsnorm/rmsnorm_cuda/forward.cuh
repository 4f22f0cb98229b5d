// RMSNorm, forward: the kernels and their arguments.
//
// Reads:    x, the residual and the weight, each once; the general kernel x and the residual, or `sum`, twice, the
//           second time from a cache.
// Writes:   `normed`, and `sum` when there is a residual.
// Must not: assume any alignment for kWidth = 1.
#pragma once

#include "kit/launch.cuh"
#include "rmsnorm_cuda/device.cuh"
#include "rmsnorm_cuda/launch_table.h"

namespace rmsnorm {

constexpr uint8_t kWholeBlock = 255;  // in place of log2_lanes: all threads of the block share a row

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
  int first_rows;            // in the ring kernel, the rows of each cluster of those blocks
  int chunk;                 // in the ring kernel, the vectors of a block and row
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

// --- 16-byte aligned rows that registers hold. The kernel must not loop over rows or divide: with few rows, the time
// before a thread's first load counts.

// Loads a thread's vectors of a row; zeros past its end.
template <typename T, int kWidth, int kVectors>
__device__ __forceinline__ void load_row(const void* tensor, int64_t offset, int lane, int lanes, int columns,
                                         Vector<T, kWidth> (&vectors)[kVectors]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (lane + i * lanes) * kWidth;
    vectors[i] = {};
    if (column < columns) vectors[i] = load<T, kWidth>(static_cast<const T*>(tensor) + offset + column);
  }
}

// Adds the residual to a thread's vectors and stores their sum.
template <typename T, int kWidth, int kVectors>
__device__ __forceinline__ void add_residual(const FastForwardArguments& arguments, int64_t offset, int lane, int lanes,
                                             int columns, const Vector<T, kWidth> (&residual)[kVectors],
                                             Vector<T, kWidth> (&x)[kVectors]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (lane + i * lanes) * kWidth;
    x[i] = add(x[i], residual[i]);
    if (column < columns) store_result(arguments, static_cast<T*>(arguments.sum) + offset + column, x[i]);
  }
}

// Stores a thread's vectors of `normed`.
template <typename Arguments, typename T, int kWidth, int kVectors>
__device__ __forceinline__ void store_row(const Arguments& arguments, int64_t offset, int lane, int lanes, int columns,
                                          float rstd, Vector<T, kWidth> (&x)[kVectors],
                                          Factors<T, kWidth> (&factors)[kVectors]) {
  const bool rounded = sizeof(T) < sizeof(float) && arguments.rounded_before_weight;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = (lane + i * lanes) * kWidth;
    if (column < columns) {
      make_opaque(x[i]);
      factors[i].make_opaque();
      float values[kWidth];
      if constexpr (std::is_same_v<Arguments, FastForwardArguments>) {
        factors[i].decode_loaded(arguments.weight, values);
        store_result(arguments, static_cast<T*>(arguments.normed) + offset + column, norm(x[i], rstd, values, rounded));
      } else {
        factors[i].get(arguments.weight, column, values);
        store_norm(arguments, offset + column, x[i], rstd, values);
      }
    }
  }
}

// Blocks that an SM must hold, 0 for any number. Short rows take three registers more than 64 without a bound, which
// leaves an SM seven blocks of 128 threads instead of eight: 4096 rows of 1000 bfloat16 elements then need a second
// wave of blocks and are up to 12 % slower (H200). With a block per row, nvcc's code takes 38 registers without a bound
// and 42 with one, which leaves an SM two blocks of 448 threads instead of three; clang's would save registers and load
// the weight late.
#if defined(__clang__)
constexpr bool kIsClang = true;
#else
constexpr bool kIsClang = false;
#endif
constexpr int min_blocks(const ForwardLaunch& launch, bool add) {
  return launch.row_per_block && (add || !kIsClang) ? 0 : 1024 / launch.threads;
}

// With `row_per_block` a block has one row, else one row per group of 2^log2_lanes lanes.
//
// With FastForwardArguments all loads are in flight before the first is waited for, and there is no branch per vector.
// That saves 2 % of the time with large tensors and 10 % with small ones (H100).
template <int kRow, typename Arguments, typename T, bool kAdd>
__global__ void LAUNCH_BOUNDS(kForwardLaunches[kRow].threads, min_blocks(kForwardLaunches[kRow], kAdd))
    forward_aligned_kernel(const __grid_constant__ Arguments arguments) {
  constexpr ForwardLaunch kLaunch = kForwardLaunches[kRow];
  constexpr bool kBlock = kLaunch.row_per_block;
  constexpr int kWidth = kVectorBytes / sizeof(T), kVectors = kLaunch.held, kWarps = kLaunch.threads / kWarp;
  constexpr int kLog2Lanes = fixed_log2_lanes(kLaunch);
  // A residual and a weight at once would take too many registers.
  constexpr bool kWeightAfterResidual = kAdd && kVectors > 2;
  // As a constant, the number of lanes makes the distances between a thread's vectors constants as well, and keeps
  // addresses out of registers.
  const int log2_lanes = kLog2Lanes >= 0 ? kLog2Lanes : arguments.log2_lanes;
  const int lanes = kBlock ? blockDim.x : 1 << log2_lanes, lane = threadIdx.x & (kBlock ? ~0 : lanes - 1);
  const int64_t row =
      kBlock ? blockIdx.x : (static_cast<int64_t>(blockIdx.x) * kLaunch.threads + threadIdx.x) >> log2_lanes;
  // A thread without a row still takes part in its warp's reduction.
  const int columns = kBlock || row < arguments.rows ? arguments.hidden : 0;
  const int weight_columns = arguments.weight.data != nullptr ? columns : 0;
  const ForwardOffsets<kAdd> offsets(arguments, row);
  const auto load_weight = [&](int column, Factors<T, kWidth>& factors) {
    if constexpr (std::is_same_v<Arguments, FastForwardArguments>) {
      factors.load_weight_if(arguments.weight, column, column < weight_columns);
    } else {
      if (column < columns) factors.load_weight(arguments.weight, column);
    }
  };
  if (gridDim.x >= kLaunch.early_trigger_blocks) trigger_next_grid();
  if (blockIdx.x < arguments.prefetch_blocks && lane == 0) prefetch_row<T, kAdd>(arguments, row);
  grid_wait();
  if (gridDim.x < kLaunch.early_trigger_blocks) trigger_next_grid();
  Vector<T, kWidth> x[kVectors], residual[kAdd ? kVectors : 1];
  Factors<T, kWidth> factors[kVectors];
  load_row(arguments.x, offsets.x, lane, lanes, columns, x);
  if constexpr (kAdd) load_row(arguments.residual, offsets.residual, lane, lanes, columns, residual);
  if constexpr (!kWeightAfterResidual) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) load_weight((lane + i * lanes) * kWidth, factors[i]);
  }
  if constexpr (kAdd) add_residual(arguments, offsets.sum, lane, lanes, columns, residual, x);
  if constexpr (kWeightAfterResidual) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) load_weight((lane + i * lanes) * kWidth, factors[i]);
  }
  float squares[1] = {0.0f};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) squares[0] += sum_of_squares(x[i]);
  if constexpr (kBlock) {
    __shared__ float4 scratch[kWarps / 4];
    squares[0] = sum_over_block<kWarps>(squares[0], scratch);
  } else {
    sum_over_lanes(squares, lanes);
  }
  const float rstd = reciprocal_norm(squares[0], arguments.inverse_of_hidden, arguments.eps);
  store_row(arguments, offsets.normed, lane, lanes, columns, rstd, x, factors);
}

// --- rows that registers do not hold and rows that are not read in vectors

// log2_lanes is kWholeBlock, or 2^log2_lanes lanes share a row.
template <typename T, int kWidth, bool kAdd>
__global__ void __launch_bounds__(kMaxBlockThreads)
    forward_general_kernel(const __grid_constant__ ForwardArguments arguments) {
  __shared__ float4 scratch[kMaxBlockThreads / kWarp / 4];
  const bool block = arguments.log2_lanes == kWholeBlock;
  const int lanes = block ? blockDim.x : 1 << arguments.log2_lanes;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = block ? blockIdx.x : thread >> arguments.log2_lanes;
  const int64_t hidden = row < arguments.rows ? arguments.long_hidden : 0, step = static_cast<int64_t>(lanes) * kWidth;
  const int64_t first_column = static_cast<int64_t>(block ? threadIdx.x : threadIdx.x & (lanes - 1)) * kWidth;
  const ForwardOffsets<kAdd> offsets(arguments, row);
  const T* x = static_cast<const T*>(arguments.x) + offsets.x;
  grid_wait();
  trigger_next_grid();
  float squares = 0.0f;
  if (kAdd) {
    const T* residual = static_cast<const T*>(arguments.residual) + offsets.residual;
    T* sum = static_cast<T*>(arguments.sum) + offsets.sum;
#pragma unroll 2
    for (int64_t column = first_column; column < hidden; column += step) {
      const auto vector = add(load<T, kWidth>(x + column), load<T, kWidth>(residual + column));
      squares += sum_of_squares(vector);
      store(sum + column, vector);
    }
    x = sum;  // each thread reads its own results again
  } else {
#pragma unroll 4
    for (int64_t column = first_column; column < hidden; column += step) {
      squares += sum_of_squares(load<T, kWidth>(x + column));
    }
  }
  if (block) {
    squares = sum_over_block<kMaxBlockThreads / kWarp>(squares, scratch);
  } else {
    float sums[1] = {squares};
    sum_over_lanes(sums, lanes);
    squares = sums[0];
  }
  const float rstd = reciprocal_norm(squares, arguments.inverse_of_hidden, arguments.eps);
#pragma unroll 2
  for (int64_t column = first_column; column < hidden; column += step) {
    auto vector = load<T, kWidth>(x + column);
    Factors<T, kWidth> factors;
    factors.load_weight(arguments.weight, column);
    float values[kWidth];
    factors.get(arguments.weight, column, values);
    store_norm(arguments, offsets.normed + column, vector, rstd, values);
  }
}

}  // namespace rmsnorm
