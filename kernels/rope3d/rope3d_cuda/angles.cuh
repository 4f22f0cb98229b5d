// Loads the cosines and sines of one thread's pairs.
//
// Reads:    the tables of a token grid, or one table row per token.
// Must not: use an entry before all loads are issued: the latency of the table would count several times.
#pragma once

#include <cstdint>

#include "kit/elements.cuh"
#include "rope3d_cuda/params.cuh"

namespace rope3d {

using namespace kit;

// The angles of a column's pairs.
template <int kPairs>
struct Angles {
  float cos[kPairs], sin[kPairs];
  uint32_t passthrough = 0;  // bit i: pair i is not rotated
};

// The table entries of a column's pairs, which are contiguous.
template <int kPairs>
struct Entries {
  static constexpr int kWidth = kPairs == 1 ? 2 : 4;
  Vector<float, kWidth> parts[2 * kPairs / kWidth] = {};

  __device__ __forceinline__ void load_from(const float* from) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs / kWidth; ++i) parts[i] = load<float, kWidth>(from + i * kWidth);
  }

  __device__ __forceinline__ void add_to(Angles<kPairs>& angles) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      angles.cos[i] += parts[2 * i / kWidth].elements[2 * i % kWidth];
      angles.sin[i] += parts[2 * i / kWidth].elements[2 * i % kWidth + 1];
    }
  }
};

// Offsets of a token's table row on each axis. They fit in 32 bits: a table has fewer elements than that.
struct GridRows {
  int of_axis[kAxes];
};

template <typename Index>
__device__ __forceinline__ GridRows grid_rows(const Params<Index>& params, uint32_t token) {
  const auto& grid = params.grid;
  uint32_t x, y;
  const uint32_t t = grid.by_height(grid.by_width(token, x), y);
  return {{static_cast<int>(t) * grid.stride, grid.second_row + static_cast<int>(y) * grid.stride,
           grid.third_row + static_cast<int>(x) * grid.stride}};
}

// Axes with contiguous ranges of pairs. A column usually has pairs of one or two axes. Entries of pairs of other axes
// are zero, so the entries of all axes are added.
template <int kPairs, typename Index>
__device__ __forceinline__ void load_contiguous_axes(const Params<Index>& params, const GridRows& rows, int pair,
                                                     Angles<kPairs>& angles) {
  const auto& grid = params.grid;
  const auto axis_of = [&](int p) { return (p >= grid.second_begin) + (p >= grid.third_begin); };
  const auto entry = [&](int axis) {
    const int row = axis == 0 ? rows.of_axis[0] : axis == 1 ? rows.of_axis[1] : rows.of_axis[2];
    const int first = axis == 0 ? 0 : axis == 1 ? grid.second_first : grid.third_first;
    return grid.table + (row + 2 * (pair - first));
  };
  const int first = axis_of(pair), last = axis_of(min(pair + kPairs, params.pairs) - 1);
  Entries<kPairs> first_entries, last_entries;
  first_entries.load_from(entry(first));
  if (last != first) last_entries.load_from(entry(last));
#pragma unroll
  for (int i = 0; i < kPairs; ++i) angles.cos[i] = angles.sin[i] = 0.0f;
  first_entries.add_to(angles);
  last_entries.add_to(angles);
  if (last - first > 1) {
    first_entries.load_from(entry(1));
    first_entries.add_to(angles);
  }
}

// Interleaved axes: pair p is entry p / kAxes of axis p % kAxes.
template <int kPairs>
__device__ __forceinline__ void load_interleaved_axes(const float* table, const GridRows& rows, int pair,
                                                      Angles<kPairs>& angles) {
  // offsets[i]: the first entry that pairs i, i + kAxes, ... of the column need.
  const int entry = pair < 0 ? -1 : static_cast<int>(static_cast<uint32_t>(pair) / kAxes);
  const int axis = pair - entry * kAxes;
  int offsets[kAxes];
#pragma unroll
  for (int i = 0; i < kAxes; ++i) {
    const int own = axis + i < kAxes ? axis + i : axis + i - kAxes;
    // Two selections between values: clang makes branches of nested ones.
    const int later = own == 1 ? rows.of_axis[1] : rows.of_axis[2];
    offsets[i] = (own == 0 ? rows.of_axis[0] : later) + 2 * (entry + (axis + i >= kAxes));
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    angles.cos[i] = 1.0f;
    angles.sin[i] = 0.0f;
    if (!(angles.passthrough >> i & 1)) {
      const auto one = load<float, 2>(table + offsets[i % kAxes] + 2 * (i / kAxes));
      angles.cos[i] = one.elements[0];
      angles.sin[i] = one.elements[1];
    }
  }
}

// Vectorized loads from a table with one row per token; entries are kStride apart.
template <typename E, int kStride, int kPairs>
__device__ __forceinline__ void load_vectors(const E* cos, const E* sin, Angles<kPairs>& angles) {
  constexpr int kEntries = kStride * kPairs, kFits = kVectorBytes / sizeof(E),
                kWidth = kEntries < kFits ? kEntries : kFits;
  Vector<E, kWidth> cosines[kEntries / kWidth], sines[kEntries / kWidth];
#pragma unroll
  for (int i = 0; i < kEntries / kWidth; ++i) {
    cosines[i] = load<E, kWidth>(cos + i * kWidth);
    sines[i] = load<E, kWidth>(sin + i * kWidth);
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    angles.cos[i] = decode(cosines[i * kStride / kWidth].elements[i * kStride % kWidth]);
    angles.sin[i] = decode(sines[i * kStride / kWidth].elements[i * kStride % kWidth]);
  }
}

// Scalar loads of at most `count` entries at any stride and alignment.
template <typename E, int kPairs>
__device__ __forceinline__ void load_scalars(const E* cos, const E* sin, int64_t stride, int count,
                                             Angles<kPairs>& angles) {
  E cosines[kPairs], sines[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t offset = min(i, count - 1) * stride;
    cosines[i] = cos[offset];
    sines[i] = sin[offset];
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    angles.cos[i] = decode(cosines[i]);
    angles.sin[i] = decode(sines[i]);
  }
}

template <typename E, int kPairs, typename Index>
__device__ __forceinline__ void load_token_row(const Params<Index>& params, uint32_t sequence, uint32_t token, int pair,
                                               Angles<kPairs>& angles) {
  const auto& table = params.tokens;
  const int64_t offset = sequence * table.batch_stride + token * table.row_stride + pair * table.pair_stride;
  const E *cos = static_cast<const E*>(table.cos) + offset, *sin = static_cast<const E*>(table.sin) + offset;
  if (kPairs == 1 || !params.vectorized_table) {
    load_scalars(cos, sin, table.pair_stride, params.pairs - pair, angles);
  } else if (table.pair_stride == 1) {
    load_vectors<E, 1>(cos, sin, angles);
  } else {
    load_vectors<E, 2>(cos, sin, angles);
  }
}

// Loads the angles of the pairs from `pair` on. `token` does not count the prefix. The angles of pairs that are not
// rotated are unspecified.
template <Source kSource, int kPairs, typename Index>
__device__ __forceinline__ void load_angles(const Params<Index>& params, uint32_t sequence, uint32_t token, int pair,
                                            Angles<kPairs>& angles) {
  if constexpr (kSource == Source::contiguous_axes) {
    load_contiguous_axes(params, grid_rows(params, token), pair, angles);
  } else if constexpr (kSource == Source::interleaved_axes) {
    load_interleaved_axes(params.grid.table, grid_rows(params, token), pair, angles);
  } else {
    switch (params.tokens.type) {
      case Type::float32:
        load_token_row<float>(params, sequence, token, pair, angles);
        break;
      case Type::float16:
        load_token_row<__half>(params, sequence, token, pair, angles);
        break;
      case Type::bfloat16:
        load_token_row<__nv_bfloat16>(params, sequence, token, pair, angles);
        break;
    }
  }
#pragma unroll
  for (int j = 0; j < kPairs; ++j) angles.sin[j] *= params.sign;
}

}  // namespace rope3d
