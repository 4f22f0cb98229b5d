// RMSNorm with rotary embedding: what the fast kernels of both passes share.
//
// Reads:    the weights and the tables.
// Must not: depend on the pass.
//
// A column is what a thread reads of a head at once: two vectors. They are adjacent and have whole pairs, or, with
// half-split pairs, the first has the first and the second the second elements of its pairs. The threads of a row have
// one column each, or a few at equal distances. A thread has the same columns of q and of k, for which it loads the
// angles once.
//
// Both forms of pairs share the kernels: each use of `half` is a branch that all threads take alike, and one kernel for
// each form would be twice as many bytes in the package.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "rope3d/norm_problem.h"
#include "rope3d_cuda/angles.cuh"
#include "rope3d_cuda/norm_launch_table.h"
#include "rope3d_cuda/params.cuh"

namespace rope3d {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Strides are in vectors.
struct NormLayout {
  const void* data;
  uint32_t batch, token, head;
};

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
  uint32_t table_batch, table_row;  // strides in vectors of 16 bytes
  bool doubled_table;               // the entries of two pairs are two apart, else adjacent
  bool float32_table;               // and the dtype of q is another
};

template <typename T, int kRow>
struct NormTile {
  static constexpr NormLaunch kLaunch = kNormLaunches[kRow];
  static constexpr bool kBlock = kLaunch.row_per_block;
  static constexpr int kWidth = norm_width(sizeof(T));     // elements of a vector
  static constexpr int kElements = 2 * kWidth;             // of a column
  static constexpr int kPairs = kWidth;                    // of a column
  static constexpr int kColumns = kLaunch.columns;         // of a thread in each row
  static constexpr int kRows = kMaxSides * kLaunch.heads;  // of a thread; row i belongs to side i % kMaxSides
};

// The 16-bit elements of a word. Arrays of 16-bit elements cost nvcc an instruction per element to take apart, and for
// some capabilities as many, right after each load, to put together again.
template <typename T>
__device__ __forceinline__ float2 decode_pair(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  } else {
    __half2 pair;
    memcpy(&pair, &word, sizeof(pair));
    return __half22float2(pair);
  }
}
template <typename T>
__device__ __forceinline__ uint32_t encode_pair(float a, float b) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    // Half the instructions of __floats2bfloat162_rn, which these capabilities lack. Rounds to nearest, ties to even.
    const auto round = [](float value) {
      const uint32_t bits = __float_as_uint(value);
      return value == value ? bits + 0x7fff + (bits >> 16 & 1) : 0x7fff0000;
    };
    word = __byte_perm(round(a), round(b), 0x7632);
#else
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    memcpy(&word, &pair, sizeof(word));
#endif
  } else {
    const __half2 pair = __floats2half2_rn(a, b);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

template <typename Tile, typename T>
struct ColumnData {
  static constexpr int kWords = 4;
  uint32_t words[kWords];

  __device__ __forceinline__ void fill(float value) {
    float values[Tile::kElements];
#pragma unroll
    for (float& each : values) each = value;
    encode_all(values);
  }

  __device__ __forceinline__ void load_from(const uint2* vectors, bool half, uint32_t first, uint32_t second) {
    uint4 all;
    if (half) {
      const uint2 a = vectors[first], b = vectors[second];
      all = {a.x, a.y, b.x, b.y};
    } else {
      all = *reinterpret_cast<const uint4*>(vectors + first);
    }
    memcpy(words, &all, sizeof(all));
  }
  __device__ __forceinline__ void store_to(uint2* vectors, bool half, uint32_t first, uint32_t second) const {
    if (half) {
      store_word(vectors + first, uint2{words[0], words[1]});
      store_word(vectors + second, uint2{words[2], words[3]});
    } else {
      store_word(reinterpret_cast<uint4*>(vectors + first), uint4{words[0], words[1], words[2], words[3]});
    }
  }

  __device__ __forceinline__ void decode_all(float (&values)[Tile::kElements]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == sizeof(float)) {
        values[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = decode_pair<T>(words[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
      }
    }
  }
  __device__ __forceinline__ void encode_all(const float (&values)[Tile::kElements]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == sizeof(float)) {
        words[i] = __float_as_uint(values[i]);
      } else {
        words[i] = encode_pair<T>(values[2 * i], values[2 * i + 1]);
      }
    }
  }
  // Hides the values from the compiler, which else keeps the decoded elements from one use to the next, in twice the
  // registers.
  __device__ __forceinline__ void make_opaque() {
    if constexpr (sizeof(T) < sizeof(float)) {
#pragma unroll
      for (uint32_t& word : words) asm volatile("" : "+r"(word));
    }
  }
};

// A column of a row: its head, counted from the first one of the row, its vectors in the head, and its first pair.
struct NormColumn {
  bool in_row;
  uint32_t head, first, second;
  int pair;
  bool rotated;  // in tokens after the prefix

  // The index of the first weight of the head.
  __device__ __forceinline__ uint32_t first_weight(const NormParams& params) const {
    return params.per_token ? head * params.width : 0;
  }
  // The index of a vector's first weight. kWidth: elements of a vector.
  template <int kWidth>
  __device__ __forceinline__ uint32_t weight_index(const NormParams& params, int vector) const {
    return first_weight(params) + (vector == 0 ? first : second) * kWidth;
  }
};

template <typename Tile>
__device__ __forceinline__ NormColumn norm_column(const NormParams& params, uint32_t number) {
  NormColumn column{number < params.row_columns, 0, 0, 0, 0, false};
  uint32_t in_head = number;
  if (Tile::kBlock) column.head = params.by_columns(number, in_head);
  column.pair = static_cast<int>(in_head) * Tile::kPairs;
  column.rotated = column.pair < params.pairs;
  // With half-split pairs, the rotated columns come first, then those that are not rotated.
  const int skipped = column.rotated ? 0 : params.pairs,
            distance = column.rotated ? params.pairs : params.passthrough / 2;
  column.first = params.half ? in_head + skipped / Tile::kWidth : 2 * in_head;
  column.second = column.first + (params.half ? distance / Tile::kWidth : 1);
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
  const uint32_t head = unit.group + kRow / kMaxSides * params.groups + column.head;
  return unit.sequence * layout.batch + unit.token * layout.token + head * layout.head;
}

// Calls `body(i)` for all i below kCount, as compile-time constants.
template <int kCount, int kIndex = 0, typename Body>
__device__ __forceinline__ void for_each_constant(Body&& body) {
  if constexpr (kIndex < kCount) {
    body(std::integral_constant<int, kIndex>{});
    for_each_constant<kCount, kIndex + 1>(body);
  }
}

// Calls `body(row, column)` for every row and column of a thread, as compile-time constants. The rows of a side are
// next to each other.
template <typename Tile, typename Body>
__device__ __forceinline__ void for_each_column(Body&& body) {
  constexpr int kHeads = Tile::kLaunch.heads;
  for_each_constant<Tile::kRows * Tile::kColumns>([&](auto i) {
    constexpr int kSide = i() / kHeads / Tile::kColumns, kHead = i() % kHeads;
    body(std::integral_constant<int, kHead * kMaxSides + kSide>{},
         std::integral_constant<int, i() / kHeads % Tile::kColumns>{});
  });
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
  data = {};
  if (!has_column<kRow>(params, unit, column)) return;
  const uint2* from = static_cast<const uint2*>(layout.data) + head_offset<kRow>(params, layout, unit, column);
  data.load_from(from, params.half, column.first, column.second);
}

template <typename Tile, typename T, int kRow>
__device__ __forceinline__ void store_column(const NormParams& params, const NormLayout& layout, const NormUnit& unit,
                                             const NormColumn& column, const ColumnData<Tile, T>& data) {
  uint2* to = static_cast<uint2*>(const_cast<void*>(layout.data)) + head_offset<kRow>(params, layout, unit, column);
  data.store_to(to, params.half, column.first, column.second);
}

// Loads the weights of a column, if they have the dtype of q; they are 1 if there are none.
template <typename Tile, typename T>
__device__ __forceinline__ void load_weights(const NormParams& params, const NormSide& norm, const NormColumn& column,
                                             ColumnData<Tile, T>& weights) {
  weights.fill(1.0f);
  if (norm.weight == nullptr || norm.float32_weight || !column.in_row || column.head >= norm.heads) return;
  const uint2* from = static_cast<const uint2*>(norm.weight) + column.first_weight(params) / Tile::kWidth;
  weights.load_from(from, params.half, column.first, column.second);
}

// Sets the factors of a column, from weights that have been loaded or, where they would take too many registers, from
// memory.
template <typename Tile, typename T, bool kLoaded>
__device__ __forceinline__ void get_factors(const NormParams& params, const NormSide& norm, const NormColumn& column,
                                            ColumnData<Tile, T>& loaded, float (&factors)[Tile::kElements]) {
  if (sizeof(T) < sizeof(float) && norm.float32_weight) {
#pragma unroll
    for (int vector = 0; vector < 2; ++vector) {
      const uint32_t index = column.template weight_index<Tile::kWidth>(params, vector);
      float values[Tile::kWidth];
      load_floats(static_cast<const float*>(norm.weight) + index, values);
#pragma unroll
      for (int i = 0; i < Tile::kWidth; ++i) factors[vector * Tile::kWidth + i] = values[i];
    }
  } else {
    if (!kLoaded) load_weights(params, norm, column, loaded);
    loaded.make_opaque();
    loaded.decode_all(factors);
  }
#pragma unroll
  for (float& factor : factors) factor += norm.offset;
}

// Loads the angles of a column; they are zero if it is not rotated.
template <typename Tile, typename T>
__device__ __forceinline__ void load_column_angles(const NormParams& params, const NormUnit& unit,
                                                   const NormColumn& column, Angles<Tile::kPairs>& angles) {
  if (!unit.exists || !column.in_row || !column.rotated || unit.token < params.prefix) {
#pragma unroll
    for (int i = 0; i < Tile::kPairs; ++i) {
      angles.cos[i] = 1.0f;
      angles.sin[i] = 0.0f;
    }
    return;
  }
  const uint32_t row = unit.sequence * params.table_batch + (unit.token - params.prefix) * params.table_row;
  const uint4 *cos_row = static_cast<const uint4*>(params.cos) + row,
              *sin_row = static_cast<const uint4*>(params.sin) + row;
  const auto load_as = [&](auto tag) {
    using Entry = typename decltype(tag)::Element;
    const auto *cos = reinterpret_cast<const Entry*>(cos_row), *sin = reinterpret_cast<const Entry*>(sin_row);
    if (params.doubled_table) {
      load_vectors<Entry, 2>(cos + 2 * column.pair, sin + 2 * column.pair, angles);
    } else {
      load_vectors<Entry, 1>(cos + column.pair, sin + column.pair, angles);
    }
  };
  if (sizeof(T) < sizeof(float) && params.float32_table) {
    load_as(Tag<float>{});
  } else {
    load_as(Tag<T>{});
  }
}

// Rotates a column by its angles; kInverse: by the negative angles.
template <typename Tile, bool kInverse>
__device__ __forceinline__ void rotate_column(bool half, const Angles<Tile::kPairs>& angles,
                                              float (&values)[Tile::kElements]) {
  const auto rotate = [&](int i, float& a, float& b) {
    const float x = a, y = b, cos = angles.cos[i], sin = kInverse ? -angles.sin[i] : angles.sin[i];
    a = x * cos - y * sin;
    b = x * sin + y * cos;
  };
  if (half) {
#pragma unroll
    for (int i = 0; i < Tile::kPairs; ++i) rotate(i, values[i], values[Tile::kWidth + i]);
  } else {
#pragma unroll
    for (int i = 0; i < Tile::kPairs; ++i) rotate(i, values[2 * i], values[2 * i + 1]);
  }
}

// Adds up the sums of the threads of a row. A block-wide row uses `scratch`, which a caller may use again after the
// next __syncthreads.
template <typename Tile, int kSums>
__device__ __forceinline__ void sum_over_row(const NormParams& params, float (&sums)[kSums],
                                             float (&scratch)[Tile::kLaunch.threads / kWarp][kSums]) {
  const int lanes = Tile::kBlock ? kWarp : 1 << params.log2_lanes;
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (float& sum : sums) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  if constexpr (Tile::kBlock) {
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) scratch[threadIdx.x / kWarp][i] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
#pragma unroll 4
    for (uint32_t warp = 0; warp < blockDim.x / kWarp; ++warp) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += scratch[warp][i];
    }
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
