// Pieces of rows in buffers of floats, for RMSNorm and rotary embedding on the CPU.
//
// Reads:    elements of heads.
// Writes:   elements of heads, and buffers of the caller.
// Must not: allocate, or compute anything but conversions.
//
// Everything is always inlined, because the callers are compiled once per instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "kit/cpu.h"
#include "rope3d/norm_problem.h"

namespace rope3d {

using namespace kit;

enum class Instructions { base, avx2, avx512 };

// Floats of a buffer; the longest rows of common models have 5120. A call has seven buffers (168 KiB) on its stack.
constexpr int64_t kBuffer = 6144;

struct alignas(64) Buffer {
  float values[kBuffer];
};

// Consecutive heads of a row or of several, or a part of a head that does not fit a buffer. The elements of a head that
// are adjacent are a run; a part has two if the first and the second elements of its pairs are apart. In a buffer all
// elements are adjacent, and the pairs that are rotated come first in each head.
struct Piece {
  int64_t head, heads;
  int64_t runs, length;  // runs of each head, and elements of a run
  int64_t starts[2];     // the elements of a head at which its runs start
  int64_t pair, pairs;   // that are rotated: the first, and how many

  INLINE int64_t elements() const { return heads * runs * length; }
};

// Returns the piece that starts after `begin` of `end` elements, which are those of whole heads.
INLINE Piece piece_at(const Rotation& rotation, int64_t begin, int64_t end) {
  const int64_t width = rotation.width;
  if (width <= kBuffer) {
    return {begin / width, std::min(kBuffer, end - begin) / width, 1, width, {0, 0}, 0, rotation.pairs};
  }
  const int64_t head = begin / width, element = begin % width, pair = element / 2;
  if (pair >= rotation.pairs) return {head, 1, 1, std::min(kBuffer, width - element), {element, 0}, 0, 0};
  const int64_t pairs = std::min(kBuffer / 2, rotation.pairs - pair);
  if (rotation.half) return {head, 1, 2, pairs, {pair, pair + rotation.pairs}, pair, pairs};
  return {head, 1, 1, 2 * pairs, {element, 0}, pair, pairs};
}

// The dtype that is converted in code for an instruction set.
#if defined(__x86_64__)
template <class T, Instructions kSet>
using Converted = std::conditional_t<kSet == Instructions::avx512, ForAvx512<T>,
                                     std::conditional_t<kSet == Instructions::avx2, ForAvx2<T>, T>>;
#else
template <class T, Instructions kSet>
using Converted = T;
#endif

// Returns a * b + c, rounded once if the instruction set can.
template <Instructions kSet>
INLINE float multiply_add(float a, float b, float c) {
#if !defined(__FP_FAST_FMAF)
  if constexpr (kSet == Instructions::base) return a * b + c;
#endif
  return __builtin_fmaf(a, b, c);
}

// Returns a value rounded to T. Its magnitude is less than 2^16 - 16, or it is NaN.
template <class T, Instructions kSet>
INLINE float round_small(float value) {
  if constexpr (std::is_same_v<T, Float32>) return value;
  // Add and subtract c = 1.5 * 2^n times the value's power of two, n being how many bits T has less than float32: the
  // lowest bit of the sum is the lowest of T. Below T's least normal number its power of two is taken. These are fewer
  // instructions than a conversion to 16 bits and back; -0 becomes 0.
  constexpr bool kIsHalf = std::is_same_v<T, Float16>;
  constexpr float kAdded = kIsHalf ? 0x1.8p13f : 0x1.8p16f;
  constexpr int32_t kLeast = kIsHalf ? 0x38800000 : 0x00800000;
  const int32_t exponent = bit_cast<int32_t>(value) & 0x7f800000;
  const auto power = bit_cast<float>(exponent > kLeast ? exponent : kLeast);
  return multiply_add<kSet>(power, -kAdded, multiply_add<kSet>(power, kAdded, value));
}

// Returns a value rounded to T.
template <class T, Instructions kSet>
INLINE float round_to(float value) {
  if constexpr (std::is_same_v<T, Float16>) {
    const float rounded = round_small<T, kSet>(value);
    return std::abs(value) < 65520.0f ? rounded : value * std::numeric_limits<float>::infinity();
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = bit_cast<uint32_t>(value);
    const auto rounded = bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
    return value == value ? rounded : value;  // a carry could change NaN
  }
  return value;
}

// Returns whether the elements of a piece are adjacent in memory, where heads are `stride` apart.
INLINE bool adjacent(const Piece& piece, int64_t stride) {
  return piece.runs == 1 && (piece.heads == 1 || stride == piece.length);
}

// Returns the elements of a piece as floats: where they are, or in the buffer.
template <class T, Instructions kSet>
INLINE const float* load(const typename T::Storage* heads, int64_t stride, const Piece& piece, Buffer& buffer) {
  heads += piece.head * stride;
  if (adjacent(piece, stride)) {
    if constexpr (std::is_same_v<T, Float32>) return heads + piece.starts[0];
    decode_all<Converted<T, kSet>>(heads + piece.starts[0], piece.elements(), buffer.values);
    return buffer.values;
  }
  float* to = buffer.values;
  for (int64_t head = 0; head < piece.heads; ++head, heads += stride) {
    for (int64_t run = 0; run < piece.runs; ++run, to += piece.length) {
      decode_all<Converted<T, kSet>>(heads + piece.starts[run], piece.length, to);
    }
  }
  return buffer.values;
}

// Calls `write(to)`, which writes the elements of a piece as floats: where they belong, or into the buffer.
template <class T, Instructions kSet, class Write>
INLINE void store(typename T::Storage* heads, int64_t stride, const Piece& piece, Buffer& buffer, Write&& write) {
  heads += piece.head * stride;
  const bool is_adjacent = adjacent(piece, stride);
  float* to = buffer.values;
  if constexpr (std::is_same_v<T, Float32>) to = is_adjacent ? heads + piece.starts[0] : to;
  write(to);
  if (is_adjacent) {
    if constexpr (!std::is_same_v<T, Float32>)
      encode_all<Converted<T, kSet>>(to, piece.elements(), heads + piece.starts[0]);
    return;
  }
  for (int64_t head = 0; head < piece.heads; ++head, heads += stride) {
    for (int64_t run = 0; run < piece.runs; ++run, to += piece.length) {
      encode_all<Converted<T, kSet>>(to, piece.length, heads + piece.starts[run]);
    }
  }
}

}  // namespace rope3d
