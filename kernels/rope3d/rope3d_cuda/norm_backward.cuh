// RMSNorm with rotary embedding, backward: aligned rows that registers hold.
//
// Reads:    the gradients of the results, q and k, and the tables, each once from memory; and the weights.
// Writes:   the gradients of q and k, and, if requested, partial sums of the weights' gradients for each block.
// Must not: use atomics: equal inputs give equal bits.
//
// With g = the gradient rotated by the negative angles and f = the factors, the gradient of x is
// rstd * (g * f - x * rstd^2 * mean(g * f * x)), and that of the weight the sum of g * x * rstd over the rows.
#pragma once

#include "rope3d_cuda/norm_rows.cuh"

namespace rope3d {

// Adds up the sums of the threads of a block that have the same column, and writes the block's part. For rows of lanes
// of a warp, whose columns are those of one head.
template <typename Tile>
__device__ __forceinline__ void store_sums_of_lanes(const NormParams& params, const NormSide& side,
                                                    float (&sums)[Tile::kElements]) {
  constexpr int kWarps = Tile::kLaunch.threads / kWarp;
  __shared__ float of_warps[kWarps][kWarp][Tile::kElements];
  const int lanes = 1 << params.log2_lanes;
  for (int distance = lanes; distance < kWarp; distance *= 2) {
#pragma unroll
    for (int i = 0; i < Tile::kElements; ++i) sums[i] += shuffle_xor(sums[i], distance);
  }
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  __syncthreads();  // the sums of the other side have been read
  if (lane < lanes) {
#pragma unroll
    for (int i = 0; i < Tile::kElements; ++i) of_warps[warp][lane][i] = sums[i];  // `store_floats` is for global memory
  }
  __syncthreads();
  for (int i = threadIdx.x; i < lanes * Tile::kElements; i += blockDim.x) {
    const NormColumn column = norm_column<Tile>(params, i / Tile::kElements);
    if (!column.in_row) continue;
    const int element = i % Tile::kElements;
    float sum = 0.0f;
    for (int other = 0; other < kWarps; ++other) sum += of_warps[other][i / Tile::kElements][element];
    const uint32_t index = column.template weight_index<Tile::kWidth>(element / Tile::kWidth);
    side.partial[blockIdx.x * static_cast<int64_t>(side.row_elements) + index + element % Tile::kWidth] = sum;
  }
}

// For rows of a block: a thread has the only sums of its columns.
template <typename Tile>
__device__ __forceinline__ void store_sums_of_block(const NormSide& side, const NormColumn (&columns)[Tile::kColumns],
                                                    const float (&sums)[Tile::kColumns][Tile::kElements]) {
  float* part = side.partial + blockIdx.x * static_cast<int64_t>(side.row_elements);
#pragma unroll
  for (int i = 0; i < Tile::kColumns; ++i) {
    if (!columns[i].in_row || columns[i].head >= side.heads) continue;
#pragma unroll
    for (int vector = 0; vector < Tile::kVectors; ++vector) {
      float values[Tile::kWidth];
#pragma unroll
      for (int j = 0; j < Tile::kWidth; ++j) values[j] = sums[i][vector * Tile::kWidth + j];
      store_floats(part + columns[i].template weight_index<Tile::kWidth>(vector), values);
    }
  }
}

template <typename T, int kRow, int kValues>
__global__ void LAUNCH_BOUNDS(kNormLaunches[kRow].threads,
                              kNormLaunches[kRow].threads_per_sm / kNormLaunches[kRow].threads)
    norm_rotate_backward_kernel(const __grid_constant__ NormParams params) {
  using Tile = NormTile<T, kRow>;
  constexpr int kSums = 2 * Tile::kRows;  // of squares, and of products with the gradient
  // Rows take turns with two buffers: a thread may still read the sums of one row while others write those of the next.
  __shared__ alignas(16) float scratch[2][Tile::kLaunch.threads / kWarp][kSums];
  NormColumn columns[Tile::kColumns];
#pragma unroll
  for (int i = 0; i < Tile::kColumns; ++i) {
    columns[i] = norm_column<Tile>(params, lane_of_row<Tile>(params) + i * blockDim.x);
  }
  const uint32_t step = gridDim.x * units_per_block<Tile>(params);
  float weight_sums[kMaxSides][Tile::kColumns][Tile::kElements] = {};
  grid_wait();
  ColumnData<Tile, T> weights;
  uint32_t buffer = 0;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * units_per_block<Tile>(params); first < params.units; first += step) {
    const NormUnit unit = norm_unit(params, first + unit_in_block<Tile>(params));
    ColumnData<Tile, T> x[Tile::kRows][Tile::kColumns], grad[Tile::kRows][Tile::kColumns];
    for_each_column<Tile>([&](auto row, auto i) {
      const NormSide& side = params.sides[row() % kMaxSides];
      load_column<Tile, T, row()>(params, side.x, unit, columns[i()], x[row()][i()]);
      load_column<Tile, T, row()>(params, side.from, unit, columns[i()], grad[row()][i()]);
    });
    Angles<Tile::kPairs, kValues> angles[Tile::kColumns];
#pragma unroll
    for (int i = 0; i < Tile::kColumns; ++i) load_column_angles<Tile, T>(params, unit, columns[i], angles[i]);
    float sums[kSums] = {};
    for_each_column<Tile>([&](auto row, auto i) {
      if (!has_column<row()>(params, unit, columns[i()])) return;
      float values[Tile::kElements], grads[Tile::kElements], factors[Tile::kElements];
      x[row()][i()].decode_all(values);
      grad[row()][i()].decode_all(grads);
      rotate_column<Tile, true>(angles[i()], grads);
      get_factors<Tile, T, false>(params.sides[row() % kMaxSides], columns[i()], weights, factors);
#pragma unroll
      for (int j = 0; j < Tile::kElements; ++j) {
        sums[2 * row()] += values[j] * values[j];
        sums[2 * row() + 1] += values[j] * (grads[j] * factors[j]);
      }
    });
    sum_over_row<Tile>(params, sums, scratch[buffer]);
    buffer ^= 1;
    for_each_column<Tile>([&](auto row, auto i) {
      if (!has_column<row()>(params, unit, columns[i()])) return;
      constexpr int kSide = row() % kMaxSides;
      const NormSide& side = params.sides[kSide];
      const float rstd = rsqrtf(sums[2 * row()] * side.inverse_of_elements + params.eps);
      const float projection = rstd * rstd * (sums[2 * row() + 1] * side.inverse_of_elements);
      ColumnData<Tile, T>& column = x[row()][i()];
      column.make_opaque();
      grad[row()][i()].make_opaque();
      float values[Tile::kElements], grads[Tile::kElements], factors[Tile::kElements];
      column.decode_all(values);
      grad[row()][i()].decode_all(grads);
      rotate_column<Tile, true>(angles[i()], grads);
      get_factors<Tile, T, false>(side, columns[i()], weights, factors);
#pragma unroll
      for (int j = 0; j < Tile::kElements; ++j) {
        weight_sums[kSide][i()][j] += grads[j] * (values[j] * rstd);
        values[j] = rstd * (grads[j] * factors[j] - values[j] * projection);
      }
      column.encode_all(values);
      store_column<Tile, T, row()>(params, side.to, unit, columns[i()], column);
    });
  }
  trigger_next_grid();
#pragma unroll
  for (int side = 0; side < kMaxSides; ++side) {
    if (params.sides[side].partial == nullptr) continue;
    if constexpr (Tile::kBlock) {
      store_sums_of_block<Tile>(params.sides[side], columns, weight_sums[side]);
    } else {
      store_sums_of_lanes<Tile>(params, params.sides[side], weight_sums[side][0]);
    }
  }
}

}  // namespace rope3d
