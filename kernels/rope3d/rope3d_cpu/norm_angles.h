// Cosines and sines of a token, and rotation by them, for RMSNorm and rotary embedding on the CPU.
//
// Reads:    the tables, and elements in buffers of the caller or in memory.
// Writes:   rotated elements.
// Must not: allocate, or round.
//
// Everything is always inlined, because the callers are compiled once per instruction set.
#pragma once

#include <algorithm>
#include <type_traits>

#include "rope3d_cpu/norm_pieces.h"

namespace rope3d {

// A token of a sequence.
struct TokenIndex {
  int64_t sequence, token;
};

// The cosines and sines of a token for the pairs of a piece: one of each for a pair, or one for each element if those
// of a pair are adjacent, and then the first sine is negative.
struct Angles {
  int64_t sequence = -1, token = -1, pair = -1;  // whose they are
  Buffer cos, sin;
};

// Returns entries of a table as floats: where they are, or in the buffer. Strides of 1 and 2 stay, others become 1.
template <class E, Instructions kSet>
INLINE const float* load_entries(const void* table, int64_t first, int64_t stride, int64_t count, Buffer& buffer) {
  const auto* entries = static_cast<const typename E::Storage*>(table) + first;
  if (stride != 1 && stride != 2) {
    for (int64_t i = 0; i < count; ++i) buffer.values[i] = E::decode(entries[i * stride]);
  } else if constexpr (std::is_same_v<E, Float32>) {
    return entries;
  } else {
    decode_all<Converted<E, kSet>>(entries, (count - 1) * stride + 1, buffer.values);
  }
  return buffer.values;
}

template <Instructions kSet>
INLINE const float* load_entries(Type type, const void* table, int64_t first, int64_t stride, int64_t count,
                                 Buffer& buffer) {
  if (type == Type::float32) return load_entries<Float32, kSet>(table, first, stride, count, buffer);
  if (type == Type::float16) return load_entries<Float16, kSet>(table, first, stride, count, buffer);
  return load_entries<BFloat16, kSet>(table, first, stride, count, buffer);
}

// Writes entries, which are `kStride` apart, times `first` and `second` for the elements of a pair; for half-split
// pairs only the latter.
template <int64_t kStride>
INLINE void spread(const float* entries, int64_t count, bool half, float first, float second, float* to) {
  if (half) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = entries[kStride * i] * second;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      to[2 * i] = entries[kStride * i] * first;
      to[2 * i + 1] = entries[kStride * i] * second;
    }
  }
}

// Loads the angles of a piece, unless they are there. Returns how many pairs are rotated: none in the prefix.
template <Instructions kSet>
INLINE int64_t load_angles(const Rotation& rotation, const TokenIndex& index, const Piece& piece, Angles& angles) {
  const int64_t pairs = piece.pairs;
  if (index.token < rotation.prefix || pairs == 0) return 0;
  if (angles.sequence == index.sequence && angles.token == index.token && angles.pair == piece.pair) return pairs;
  angles.sequence = index.sequence;
  angles.token = index.token;
  angles.pair = piece.pair;
  const Tokens& table = rotation.table;
  const int64_t entry = index.sequence * table.batch_stride + (index.token - rotation.prefix) * table.row_stride +
                        piece.pair * table.pair_stride;
  for (const bool is_sin : {false, true}) {
    const float second = is_sin && rotation.inverse ? -1.0f : 1.0f, first = is_sin ? -second : second;
    float* to = is_sin ? angles.sin.values : angles.cos.values;
    Buffer buffer;
    const float* entries =
        load_entries<kSet>(table.type, is_sin ? table.sin : table.cos, entry, table.pair_stride, pairs, buffer);
    if (table.pair_stride == 2) {
      spread<2>(entries, pairs, rotation.half, first, second, to);
    } else {
      spread<1>(entries, pairs, rotation.half, first, second, to);
    }
  }
  return pairs;
}

// Rotates `pairs` pairs of each head of a piece, and copies the other elements. `to` may be `from`.
template <Instructions kSet>
INLINE void rotate_heads(const Piece& piece, int64_t pairs, bool half, const Angles& angles, const float* from,
                         float* to) {
  const float *cos = angles.cos.values, *sin = angles.sin.values;
  const int64_t width = piece.runs * piece.length;
  for (int64_t head = 0; head < piece.heads; ++head, from += width, to += width) {
    if (half) {
#pragma omp simd
      for (int64_t i = 0; i < pairs; ++i) {
        const float a = from[i], b = from[i + pairs];
        to[i] = multiply_add<kSet>(a, cos[i], -(b * sin[i]));
        to[i + pairs] = multiply_add<kSet>(b, cos[i], a * sin[i]);
      }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < pairs; ++i) {
        const float a = from[2 * i], b = from[2 * i + 1];
        to[2 * i] = multiply_add<kSet>(a, cos[2 * i], b * sin[2 * i]);
        to[2 * i + 1] = multiply_add<kSet>(b, cos[2 * i + 1], a * sin[2 * i + 1]);
      }
    }
    if (from != to) std::copy(from + 2 * pairs, from + width, to + 2 * pairs);
  }
}

}  // namespace rope3d
