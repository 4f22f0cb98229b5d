// RMSNorm with rotary embedding: the shared code of the fast kernels of both passes.
//
// Reads:    the weights and the tables.
// Must not: depend on the pass.
//
// A column is a thread's read of a head: a vector of whole pairs, or, split, two vectors with the first and
// the second elements of its pairs. The threads of a row have one column each, or a few at equal distances.
// A thread has the same columns of q and of k, for which it loads the angles once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kit/elements.cuh"
#include "kit/group_sums.cuh"
#include "kit/launch.cuh"
#include "rope3d/problem.h"
#include "rope3d_cuda/angles.cuh"
#include "rope3d_cuda/launch_table.h"
#include "rope3d_cuda/params.cuh"

namespace rope3d {

using NormLayout = TensorLayout<uint32_t>;

struct NormSide {
  NormLayout from, x, to;  // x: only in the backward pass
  const void* weight;
  bool float32_weight;  // and the dtype of q is another
  float offset;         // of the weight, 0 if there is none
  uint32_t heads;
  float inverse_of_elements;  // of a row
  uint32_t row_elements;
  float* partial;
};

// A unit is the work of the threads of a row for one token: `heads` heads of q and of k, from `group` on, or a row of
// all heads.
struct NormParams {
  NormSide sides[kMaxSides];
  uint32_t units, groups;
  bool tokens_fastest;     // units of consecutive tokens are adjacent, else those of the groups of a token
  FastDivisor by_inner;    // units / tokens or groups
  FastDivisor by_tokens;   // tokens / those of a sequence
  FastDivisor by_columns;  // columns of a row / those of a head
  uint32_t row_columns;    // of the longer one of both rows
  int log2_lanes;          // of a row, unless it has a whole block
  uint32_t prefix;
  int width, pairs, passthrough;
  bool half, per_token, rounded_before_weight;
  float eps;
  const void *cos, *sin;
  int64_t table_batch, table_row;
  int table_second;    // as in rope3d/problem.h
  bool float32_table;  // and the dtype of q is another
};

template <typename T, int kRow>
struct NormTile {
  static constexpr NormLaunch kLaunch = kNormLaunches[kRow];
  static constexpr bool kSplit = kLaunch.is(ColumnVectors::two), kBlock = kLaunch.row_per_block;
  static constexpr int kWidth = norm_width(kSplit, sizeof(T));
  static constexpr int kVectors = kSplit ? 2 : 1;          // of a column
  static constexpr int kElements = kVectors * kWidth;      // of a column
  static constexpr int kPairs = kElements / 2;             // of a column
  static constexpr int kColumns = kLaunch.columns;         // of a thread in each row
  static constexpr int kRows = kMaxSides * kLaunch.heads;  // of a thread; row i belongs to side i % kMaxSides

  // The elements of pair i of a column.
  static constexpr int first(int i) { return kSplit ? i : 2 * i; }
  static constexpr int second(int i) { return kSplit ? kWidth + i : 2 * i + 1; }
};

template <typename Tile, typename T>
struct ColumnData {
  Vector<T, Tile::kWidth> vectors[Tile::kVectors];

  __device__ __forceinline__ void decode_all(float (&values)[Tile::kElements]) const {
#pragma unroll
    for (int i = 0; i < Tile::kElements; ++i) {
      values[i] = decode(vectors[i / Tile::kWidth], i % Tile::kWidth);
    }
  }
  __device__ __forceinline__ void encode_all(const float (&values)[Tile::kElements]) {
#pragma unroll
    for (int vector = 0; vector < Tile::kVectors; ++vector) {
      float part[Tile::kWidth];
#pragma unroll
      for (int i = 0; i < Tile::kWidth; ++i) part[i] = values[vector * Tile::kWidth + i];
      vectors[vector] = kit::encode_all<T>(part);
    }
  }
  __device__ __forceinline__ void make_opaque() {
#pragma unroll
    for (auto& vector : vectors) kit::make_opaque(vector);
  }
};

// A column of a row: its head, counted from the first one of the row, its vectors in the head, and its first pair.
struct NormColumn {
  bool in_row;
  uint32_t head, first, second;
  int pair;
  bool rotated;           // in tokens after the prefix
  uint32_t head_weights;  // the index of the first weight of the head

  // The index of a vector's first weight. kWidth: elements of a vector.
  template <int kWidth>
  __device__ __forceinline__ uint32_t weight_index(int vector) const {
    return head_weights + (vector == 0 ? first : second) * kWidth;
  }
};

template <typename Tile>
__device__ __forceinline__ NormColumn norm_column(const NormParams& params, uint32_t number) {
  constexpr int kWidth = Tile::kWidth;
  NormColumn column{number < params.row_columns, 0, number, 0, 0, false, 0};
  if (Tile::kBlock) column.head = params.by_columns(number, column.first);
  if (params.per_token) column.head_weights = column.head * params.width;
  const int start = static_cast<int>(column.first) * kWidth;
  if constexpr (Tile::kSplit) {
    // The rotated columns come first, then those that are not rotated.
    column.pair = start;
    column.rotated = start < params.pairs;
    const int distance = column.rotated ? params.pairs : params.passthrough / 2;
    if (!column.rotated) column.first += params.pairs / kWidth;
    column.second = column.first + distance / kWidth;
  } else {
    column.pair = start / 2;
    column.rotated = column.pair < params.pairs;
  }
  return column;
}

// The token and the heads of a unit.
struct NormUnit {
  uint32_t sequence, token, group;
  bool exists;
};

__device__ __forceinline__ NormUnit norm_unit(const NormParams& params, uint32_t number) {
  NormUnit unit{0, 0, 0, number < params.units};
  uint32_t inner, token;
  const uint32_t outer = params.by_inner(unit.exists ? number : 0, inner);
  token = params.tokens_fastest ? inner : outer;
  unit.group = params.tokens_fastest ? outer : inner;
  unit.sequence = params.by_tokens(token, unit.token);
  return unit;
}

// The offset of a head's first vector.
template <int kRow>
__device__ __forceinline__ uint32_t head_offset(const NormParams& params, const NormLayout& layout,
                                                const NormUnit& unit, const NormColumn& column) {
  return layout.offset(unit.sequence, unit.token, unit.group + kRow / kMaxSides * params.groups + column.head);
}

// Calls `body(row, column)` for every row and column of a thread, as compile-time constants.
template <typename Tile, int kIndex = 0, typename Body>
__device__ __forceinline__ void for_each_column(Body&& body) {
  if constexpr (kIndex < Tile::kRows * Tile::kColumns) {
    body(std::integral_constant<int, kIndex / Tile::kColumns>{},
         std::integral_constant<int, kIndex % Tile::kColumns>{});
    for_each_column<Tile, kIndex + 1>(body);
  }
}

// Whether a thread's column exists in its `row`-th row.
template <int kRow>
__device__ __forceinline__ bool has_column(const NormParams& params, const NormUnit& unit, const NormColumn& column) {
  const uint32_t head = unit.group + kRow / kMaxSides * params.groups + column.head;
  return unit.exists && column.in_row && head < params.sides[kRow % kMaxSides].heads;
}

template <typename Tile, typename T, int kRow>
__device__ __forceinline__ void load_column(const NormParams& params, const NormLayout& layout, const NormUnit& unit,
                                            const NormColumn& column, ColumnData<Tile, T>& data) {
  using Unit = Vector<T, Tile::kWidth>;
  data = {};
  if (!has_column<kRow>(params, unit, column)) return;
  const Unit* from = static_cast<const Unit*>(layout.data) + head_offset<kRow>(params, layout, unit, column);
  data.vectors[0] = load<T, Tile::kWidth>(from[column.first].elements);
  if constexpr (Tile::kSplit) data.vectors[1] = load<T, Tile::kWidth>(from[column.second].elements);
}

template <typename Tile, typename T, int kRow>
__device__ __forceinline__ void store_column(const NormParams& params, const NormLayout& layout, const NormUnit& unit,
                                             const NormColumn& column, const ColumnData<Tile, T>& data) {
  using Unit = Vector<T, Tile::kWidth>;
  Unit* to = static_cast<Unit*>(const_cast<void*>(layout.data)) + head_offset<kRow>(params, layout, unit, column);
  store(to[column.first].elements, data.vectors[0]);
  if constexpr (Tile::kSplit) store(to[column.second].elements, data.vectors[1]);
}

// Loads the weights of a column, if they have the dtype of q; they are 1 if there are none.
template <typename Tile, typename T>
__device__ __forceinline__ void load_weights(const NormSide& norm, const NormColumn& column,
                                             ColumnData<Tile, T>& weights) {
#pragma unroll
  for (auto& vector : weights.vectors) {
#pragma unroll
    for (T& weight : vector.elements) weight = encode<T>(1.0f);
  }
  if (norm.weight == nullptr || norm.float32_weight || !column.in_row || column.head >= norm.heads) return;
#pragma unroll
  for (int vector = 0; vector < Tile::kVectors; ++vector) {
    const uint32_t index = column.template weight_index<Tile::kWidth>(vector);
    weights.vectors[vector] = load<T, Tile::kWidth>(static_cast<const T*>(norm.weight) + index);
  }
}

// Sets the factors of a column, from weights that have been loaded or, where they would take too many registers, from
// memory.
template <typename Tile, typename T, bool kLoaded>
__device__ __forceinline__ void get_factors(const NormSide& norm, const NormColumn& column, ColumnData<Tile, T>& loaded,
                                            float (&factors)[Tile::kElements]) {
  if (sizeof(T) < sizeof(float) && norm.float32_weight) {
#pragma unroll
    for (int vector = 0; vector < Tile::kVectors; ++vector) {
      const uint32_t index = column.template weight_index<Tile::kWidth>(vector);
      float values[Tile::kWidth];
      load_floats(static_cast<const float*>(norm.weight) + index, values);
#pragma unroll
      for (int i = 0; i < Tile::kWidth; ++i) factors[vector * Tile::kWidth + i] = values[i];
    }
  } else {
    if (!kLoaded) load_weights(norm, column, loaded);
    loaded.make_opaque();
    loaded.decode_all(factors);
  }
  if (norm.offset != 0.0f) {
#pragma unroll
    for (int i = 0; i < Tile::kElements; ++i) factors[i] += norm.offset;
  }
}

// Loads the angles of a column; they are zero if it is not rotated. kValues: entries per pair, in the template of the
// kernels because two of them take registers.
template <typename Tile, typename T, int kValues>
__device__ __forceinline__ void load_column_angles(const NormParams& params, const NormUnit& unit,
                                                   const NormColumn& column, Angles<Tile::kPairs, kValues>& angles) {
  if (!unit.exists || !column.in_row || !column.rotated || unit.token < params.prefix) {
#pragma unroll
    for (int i = 0; i < kValues * Tile::kPairs; ++i) {
      angles.cos[i / Tile::kPairs][i % Tile::kPairs] = 1.0f;
      angles.sin[i / Tile::kPairs][i % Tile::kPairs] = 0.0f;
    }
    return;
  }
  const int64_t first = unit.sequence * params.table_batch + (unit.token - params.prefix) * params.table_row +
                        column.pair * (Tile::kSplit ? 1 : kValues);
  const auto load_as = [&](auto tag) {
    using Entry = typename decltype(tag)::Element;
    load_vectors<Tile::kSplit>(static_cast<const Entry*>(params.cos) + first,
                               static_cast<const Entry*>(params.sin) + first, Tile::kSplit ? params.table_second : 1,
                               angles);
  };
  if (sizeof(T) < sizeof(float) && params.float32_table) {
    load_as(Tag<float>{});
  } else {
    load_as(Tag<T>{});
  }
}

// Rotates a column by its angles; kInverse: by the negative angles.
template <typename Tile, bool kInverse, int kValues>
__device__ __forceinline__ void rotate_column(const Angles<Tile::kPairs, kValues>& angles,
                                              float (&values)[Tile::kElements]) {
#pragma unroll
  for (int i = 0; i < Tile::kPairs; ++i) {
    angles.template rotate<kInverse>(i, values[Tile::first(i)], values[Tile::second(i)]);
  }
}

// Adds up the sums of the threads of a row. A block-wide row uses `scratch`, as in `sum_over_block`.
template <typename Tile, int kSums>
__device__ __forceinline__ void sum_over_row(const NormParams& params, float (&sums)[kSums],
                                             float (&scratch)[Tile::kLaunch.threads / kWarp][kSums]) {
  if constexpr (Tile::kBlock) {
    sum_over_block(sums, scratch);
  } else {
    sum_over_lanes(sums, 1 << params.log2_lanes);
  }
}

// The units of a block, and which of them, and which lane of it, a thread has.
template <typename Tile>
__device__ __forceinline__ uint32_t units_per_block(const NormParams& params) {
  return Tile::kBlock ? 1 : blockDim.x >> params.log2_lanes;
}
template <typename Tile>
__device__ __forceinline__ uint32_t unit_in_block(const NormParams& params) {
  return Tile::kBlock ? 0 : threadIdx.x >> params.log2_lanes;
}
template <typename Tile>
__device__ __forceinline__ uint32_t lane_of_row(const NormParams& params) {
  return Tile::kBlock ? threadIdx.x : threadIdx.x & ((1u << params.log2_lanes) - 1);
}

}  // namespace rope3d
