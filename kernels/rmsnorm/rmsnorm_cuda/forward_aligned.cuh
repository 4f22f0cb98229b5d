// RMSNorm, forward: 16-byte aligned rows that registers hold.
//
// Reads:    x, the residual and the weight, each once.
// Writes:   `normed`, and `sum` when there is a residual.
// Must not: loop over rows or divide: with few rows, the time before a thread's first load counts.
#pragma once

#include "rmsnorm_cuda/forward.cuh"

namespace rmsnorm {

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
template <typename Config, bool kAdd>
constexpr int kMinBlocks = kAdd && Config::kRowPerBlock ? 0 : 1024 / Config::kThreads;
#else
template <typename Config, bool kAdd>
constexpr int kMinBlocks = Config::kRowPerBlock ? 0 : 1024 / Config::kThreads;
#endif

// Config::kRowPerBlock: a block has one row, else one row per group of 2^log2_lanes lanes.
//
// With FastForwardArguments all loads are in flight before the first is waited for, and there is no branch per vector.
// That saves 2 % of the time with large tensors and 10 % with small ones (H100).
template <typename Config, typename Arguments, typename T, bool kAdd>
__global__ void LAUNCH_BOUNDS(Config::kThreads, kMinBlocks<Config, kAdd>)
    forward_aligned_kernel(const __grid_constant__ Arguments arguments) {
  constexpr bool kBlock = Config::kRowPerBlock;
  constexpr int kWidth = kVectorBytes / sizeof(T), kVectors = Config::kVectors, kWarps = Config::kThreads / kWarp;
  // A residual and a weight at once would take too many registers.
  constexpr bool kWeightAfterResidual = kAdd && kVectors > 2;
  // As a constant, the number of lanes makes the distances between a thread's vectors constants as well, and keeps
  // addresses out of registers.
  const int log2_lanes = Config::kLog2Lanes >= 0 ? Config::kLog2Lanes : arguments.log2_lanes;
  const int lanes = kBlock ? blockDim.x : 1 << log2_lanes;
  const int lane = kBlock ? threadIdx.x : threadIdx.x & (lanes - 1);
  const int64_t row =
      kBlock ? blockIdx.x : (static_cast<int64_t>(blockIdx.x) * Config::kThreads + threadIdx.x) >> log2_lanes;
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
  if (gridDim.x >= Config::kEarlyTriggerBlocks) trigger_next_grid();
  if (blockIdx.x < arguments.prefetch_blocks && (kBlock ? threadIdx.x == 0 : lane == 0))
    prefetch_row<T, kAdd>(arguments, row);
  grid_wait();
  if (gridDim.x < Config::kEarlyTriggerBlocks) trigger_next_grid();
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

}  // namespace rmsnorm
