// Loads the cosines and sines of one thread's pairs.
//
// Reads:    the tables of a token grid, or one table row per token.
// Must not: use an entry before all loads are issued: the latency of the table would count several times.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kit/elements.cuh"
#include "rope3d_cuda/params.cuh"

namespace rope3d {

using namespace kit;

// The angles of a column's pairs. kValues: 1 for both elements of a pair, or one for each.
template <int kPairs, int kValues>
struct Angles {
  float cos[kValues][kPairs], sin[kValues][kPairs];
  uint32_t passthrough = 0;  // bit i: pair i is not rotated

  // Rotates pair i. kInverse: by the transposed matrix.
  template <bool kInverse>
  __device__ __forceinline__ void rotate(int i, float& a, float& b) const {
    constexpr int kLast = kValues - 1;
    const float x = a, y = b;
    const float sin_a = kInverse ? -sin[kLast][i] : sin[0][i], sin_b = kInverse ? -sin[0][i] : sin[kLast][i];
    a = x * cos[0][i] - y * sin_a;
    b = x * sin_b + y * cos[kLast][i];
  }
};

// Tables of a grid have one angle per pair, those of tokens may have one per element.
template <Source kSource, int kPairs>
using AnglesFrom = Angles<kPairs, kSource == Source::tokens ? 2 : 1>;

// The table entries of a column's pairs, which are contiguous.
template <int kPairs>
struct Entries {
  static constexpr int kWidth = kPairs == 1 ? 2 : 4;
  Vector<float, kWidth> parts[2 * kPairs / kWidth] = {};

  __device__ __forceinline__ void load_from(const float* from) {
#pragma unroll
    for (int i = 0; i < 2 * kPairs / kWidth; ++i) parts[i] = load<float, kWidth>(from + i * kWidth);
  }

  __device__ __forceinline__ void add_to(Angles<kPairs, 1>& angles) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      angles.cos[0][i] += parts[2 * i / kWidth].elements[2 * i % kWidth];
      angles.sin[0][i] += parts[2 * i / kWidth].elements[2 * i % kWidth + 1];
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
                                                     Angles<kPairs, 1>& angles) {
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
  for (int i = 0; i < kPairs; ++i) angles.cos[0][i] = angles.sin[0][i] = 0.0f;
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
                                                      Angles<kPairs, 1>& angles) {
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
    angles.cos[0][i] = 1.0f;
    angles.sin[0][i] = 0.0f;
    if (!(angles.passthrough >> i & 1)) {
      const auto one = load<float, 2>(table + offsets[i % kAxes] + 2 * (i / kAxes));
      angles.cos[0][i] = one.elements[0];
      angles.sin[0][i] = one.elements[1];
    }
  }
}

// Adjacent entries of a table row.
template <typename E, int kCount>
struct RowEntries {
  static constexpr int kFits = kVectorBytes / sizeof(E), kWidth = kCount < kFits ? kCount : kFits;
  Vector<E, kWidth> parts[kCount / kWidth];

  __device__ __forceinline__ explicit RowEntries(const E* from) {
#pragma unroll
    for (int i = 0; i < kCount / kWidth; ++i) parts[i] = load<E, kWidth>(from + i * kWidth);
  }
  __device__ __forceinline__ float operator[](int i) const { return decode(parts[i / kWidth], i % kWidth); }
};

// Vectorized loads from a table with one row per token and one entry per pair.
template <bool kSplit, typename E, int kPairs>
__device__ __forceinline__ void load_vectors(const E* cos, const E* sin, int64_t, Angles<kPairs, 1>& angles) {
  const RowEntries<E, kPairs> cosines(cos), sines(sin);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    angles.cos[0][i] = cosines[i];
    angles.sin[0][i] = sines[i];
  }
}

// The same, with one or two entries per pair. kSplit: the entries of the second elements are `second` entries
// after those of the first ones, or the same; else the entries of a pair are adjacent or one.
template <bool kSplit, typename E, int kPairs>
__device__ __forceinline__ void load_vectors(const E* cos, const E* sin, int64_t second, Angles<kPairs, 2>& angles) {
  const bool adjacent = !kSplit && second != 0;
  const int64_t distance = adjacent ? kPairs : second;
  const RowEntries<E, kPairs> first_cosines(cos), first_sines(sin), cosines(cos + distance), sines(sin + distance);
  float values[2][2 * kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    values[0][i] = first_cosines[i];
    values[1][i] = first_sines[i];
    values[0][kPairs + i] = cosines[i];
    values[1][kPairs + i] = sines[i];
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    angles.cos[0][i] = adjacent ? values[0][2 * i] : values[0][i];
    angles.sin[0][i] = adjacent ? values[1][2 * i] : values[1][i];
    angles.cos[1][i] = adjacent ? values[0][2 * i + 1] : values[0][kPairs + i];
    angles.sin[1][i] = adjacent ? values[1][2 * i + 1] : values[1][kPairs + i];
  }
}

// Scalar loads of at most `count` entries at any stride and alignment.
template <typename E, int kPairs>
__device__ __forceinline__ void load_scalars(const E* cos, const E* sin, int64_t stride, int64_t second, int count,
                                             Angles<kPairs, 2>& angles) {
  E cosines[2][kPairs], sines[2][kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int64_t offset = min(i, count - 1) * stride;
    cosines[0][i] = cosines[1][i] = cos[offset];
    sines[0][i] = sines[1][i] = sin[offset];
    if (kPairs > 1 || second != 0) {  // the branch takes registers in kernels of several pairs
      cosines[1][i] = cos[offset + second];
      sines[1][i] = sin[offset + second];
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) {
    angles.cos[i / kPairs][i % kPairs] = decode(cosines[i / kPairs][i % kPairs]);
    angles.sin[i / kPairs][i % kPairs] = decode(sines[i / kPairs][i % kPairs]);
  }
}

template <bool kSplit, typename E, int kPairs, typename Index>
__device__ __forceinline__ void load_token_row(const Params<Index>& params, uint32_t sequence, uint32_t token, int pair,
                                               Angles<kPairs, 2>& angles) {
  const auto& table = params.tokens;
  const int64_t offset = sequence * table.batch_stride + token * table.row_stride + pair * table.pair_stride;
  const E *cos = static_cast<const E*>(table.cos) + offset, *sin = static_cast<const E*>(table.sin) + offset;
  if (kPairs == 1 || !params.vectorized_table) {
    load_scalars(cos, sin, table.pair_stride, table.second, params.pairs - pair, angles);
  } else {
    load_vectors<kSplit>(cos, sin, table.second, angles);
  }
}

// Loads the angles of the pairs from `pair` on. `token` does not count the prefix. The angles of pairs that are not
// rotated are unspecified.
template <Source kSource, bool kSplit, int kPairs, typename Index>
__device__ __forceinline__ void load_angles(const Params<Index>& params, uint32_t sequence, uint32_t token, int pair,
                                            AnglesFrom<kSource, kPairs>& angles) {
  if constexpr (kSource == Source::contiguous_axes) {
    load_contiguous_axes(params, grid_rows(params, token), pair, angles);
  } else if constexpr (kSource == Source::interleaved_axes) {
    load_interleaved_axes(params.grid.table, grid_rows(params, token), pair, angles);
  } else {
    switch (params.tokens.type) {
      case Type::float32:
        load_token_row<kSplit, float>(params, sequence, token, pair, angles);
        break;
      case Type::float16:
        load_token_row<kSplit, __half>(params, sequence, token, pair, angles);
        break;
      case Type::bfloat16:
        load_token_row<kSplit, __nv_bfloat16>(params, sequence, token, pair, angles);
        break;
    }
  }
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    angles.sin[0][j] *= params.sign;
    if constexpr (kSource == Source::tokens) {
      const float first = angles.sin[0][j], second = angles.sin[1][j] * params.sign;
      angles.sin[0][j] = params.sign < 0.0f ? second : first;
      angles.sin[1][j] = params.sign < 0.0f ? first : second;
    }
  }
}

}  // namespace rope3d
