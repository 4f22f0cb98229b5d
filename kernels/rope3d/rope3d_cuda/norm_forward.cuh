// RMSNorm with rotary embedding, forward: aligned rows that registers hold.
//
// Reads:    q, k and the weights, and the tables, each once.
// Writes:   the normalized and rotated q and k.
// Must not: access global memory before the grid wait.
#pragma once

#include "rope3d_cuda/norm_rows.cuh"

namespace rope3d {

// The launch bound. Of rows per block with two entries per pair, 16-bit elements would take 120 registers instead
// of 93.
template <typename T, int kRow, int kValues>
constexpr int kMaxNormThreads =
    kNormLaunches[kRow].row_per_block && kValues == 2 && sizeof(T) == 2 ? 640 : kNormLaunches[kRow].threads;

template <typename T, int kRow, int kValues>
__global__ void __launch_bounds__((kMaxNormThreads<T, kRow, kValues>))
    norm_rotate_kernel(const __grid_constant__ NormParams params) {
  using Tile = NormTile<T, kRow>;
  __shared__ alignas(16) float scratch[Tile::kLaunch.threads / kWarp][Tile::kRows];
  NormColumn columns[Tile::kColumns];
#pragma unroll
  for (int i = 0; i < Tile::kColumns; ++i) {
    columns[i] = norm_column<Tile>(params, lane_of_row<Tile>(params) + i * blockDim.x);
  }
  const NormUnit unit = norm_unit(params, blockIdx.x * units_per_block<Tile>(params) + unit_in_block<Tile>(params));
  grid_wait();
  ColumnData<Tile, T> data[Tile::kRows][Tile::kColumns];
  for_each_column<Tile>([&](auto row, auto i) {
    load_column<Tile, T, row()>(params, params.sides[row() % kMaxSides].from, unit, columns[i()], data[row()][i()]);
  });
  ColumnData<Tile, T> weights[kMaxSides][Tile::kColumns];
#pragma unroll
  for (int i = 0; i < kMaxSides * Tile::kColumns; ++i) {
    const int side = i / Tile::kColumns, column = i % Tile::kColumns;
    load_weights(params.sides[side], columns[column], weights[side][column]);
  }
  Angles<Tile::kPairs, kValues> angles[Tile::kColumns];
#pragma unroll
  for (int i = 0; i < Tile::kColumns; ++i) load_column_angles<Tile, T>(params, unit, columns[i], angles[i]);
  trigger_next_grid();
  float sums[Tile::kRows] = {};
  for_each_column<Tile>([&](auto row, auto i) {
    float values[Tile::kElements];
    data[row()][i()].decode_all(values);
#pragma unroll
    for (int j = 0; j < Tile::kElements; ++j) sums[row()] += values[j] * values[j];
  });
  sum_over_row<Tile>(params, sums, scratch);
  for_each_column<Tile>([&](auto row, auto i) {
    if (!has_column<row()>(params, unit, columns[i()])) return;
    constexpr int kSide = row() % kMaxSides;
    const NormSide& side = params.sides[kSide];
    const float rstd = rsqrtf(sums[row()] * side.inverse_of_elements + params.eps);
    ColumnData<Tile, T>& column = data[row()][i()];
    column.make_opaque();
    float values[Tile::kElements], factors[Tile::kElements];
    column.decode_all(values);
    get_factors<Tile, T, true>(side, columns[i()], weights[kSide][i()], factors);
    // With a range-based loop, nvcc does not unroll this, and finds each register by comparisons.
#pragma unroll
    for (int j = 0; j < Tile::kElements; ++j) values[j] *= rstd;
    if constexpr (sizeof(T) < sizeof(float)) {
      // A branch would duplicate the code after it.
      column.encode_all(values);
      float rounded[Tile::kElements];
      column.decode_all(rounded);
#pragma unroll
      for (int j = 0; j < Tile::kElements; ++j) values[j] = params.rounded_before_weight ? rounded[j] : values[j];
    }
#pragma unroll
    for (int j = 0; j < Tile::kElements; ++j) values[j] *= factors[j];
    column.encode_all(values);
    column.decode_all(values);
    rotate_column<Tile, false>(angles[i()], values);
    column.encode_all(values);
    store_column<Tile, T, row()>(params, side.to, unit, columns[i()], column);
  });
}

}  // namespace rope3d
