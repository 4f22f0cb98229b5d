// RMSNorm and rotary embedding in one pass, on the CPU.
//
// Reads:    q and k, or them and the gradients of the results; the weights, and the tables of cosines and sines.
// Writes:   the results, or the gradients and the partial sums of those of the weights.
// Must not: start threads, allocate, or keep state between calls.
//
// Rows are decoded into buffers of floats, as many heads of a token at a time as fit; a row that does not fit is
// decoded in pieces, twice. The cosines and sines of a token serve all its heads, and the factors all tokens of a call.
// The loops over a buffer vectorize; they are compiled once per instruction set, and one is selected at run time.
#include "rope3d_cpu/norm_rotary.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "kit/cpu.h"

namespace rope3d {
namespace {

using namespace kit;

enum class Instructions { base, avx2, avx512 };

constexpr int64_t kBuffer = 6144;  // floats of a buffer; the longest rows of common models have 5120
constexpr int64_t kRows = 8;       // processed at a time, at most
constexpr int64_t kLanes = 32;     // sums of a row's elements: enough to hide the latency of an addition

// Additions to a partial sum of a weight's gradient, and the rows of a token that one of them adds. A longer float32
// sum would have a larger error than the rounding of a result.
constexpr int64_t kAdditions = 16;
constexpr int64_t kRowsAdded = 4;

struct alignas(64) Buffer {
  float values[kBuffer];
};

// Consecutive heads of a row or of several, or a part of a head that does not fit a buffer. In a buffer its elements
// are adjacent, and the pairs that are rotated come first in each head.
struct Piece {
  int64_t head, heads;
  int64_t runs,
      length;         // of adjacent elements of a head: one, or two that are the first and the second elements of pairs
  int64_t starts[2];  // elements of the head
  int64_t pair, pairs;  // that are rotated

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

template <class T, Instructions kSet>
constexpr bool kConverts = std::is_same_v<T, Float16> && kSet != Instructions::base;  // by functions of kit/cpu.h

template <class T, Instructions kSet>
INLINE void decode_all(const typename T::Storage* from, float* to, int64_t count) {
  if constexpr (kConverts<T, kSet>) {
    float16_to_floats(from, to, count);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = T::decode(from[i]);
  }
}

template <class T, Instructions kSet>
INLINE void encode_all(const float* from, typename T::Storage* to, int64_t count) {
  if constexpr (kConverts<T, kSet>) {
    floats_to_float16(from, to, count);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = T::encode(from[i]);
  }
}

// Returns a * b + c, rounded once if the instruction set can.
template <Instructions kSet>
INLINE float multiply_add(float a, float b, float c) {
#if !defined(__FP_FAST_FMAF)
  if constexpr (kSet == Instructions::base) return a * b + c;
#endif
  return __builtin_fmaf(a, b, c);
}

// Returns a value whose magnitude is less than float16's infinity, or NaN, rounded to T.
template <class T, Instructions kSet>
INLINE float round_small(float value) {
#if !defined(__aarch64__)
  if constexpr (std::is_same_v<T, Float16>) {
    // A sum with 1.5 * 2^13 times the value's power of two, or times that of the least normal number, has 11 bits for
    // the value. Fewer instructions than converting to 16 bits and back.
    const int32_t exponent = bit_cast<int32_t>(value) & 0x7f800000;
    const auto power = bit_cast<float>(exponent > 0x38800000 ? exponent : 0x38800000);
    const float sum = multiply_add<kSet>(power, 0x1.8p13f, value);
    return multiply_add<kSet>(power, -0x1.8p13f, sum);
  }
#endif
  return T::decode(T::encode(value));
}

// Returns a value rounded to T.
template <class T, Instructions kSet>
INLINE float round_to(float value) {
  const float rounded = round_small<T, kSet>(value);
  if constexpr (!std::is_same_v<T, Float16>) return rounded;
  return std::abs(value) < 65520.0f ? rounded : value * std::numeric_limits<float>::infinity();
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
    decode_all<T, kSet>(heads + piece.starts[0], buffer.values, piece.elements());
    return buffer.values;
  }
  float* to = buffer.values;
  for (int64_t head = 0; head < piece.heads; ++head, heads += stride) {
    for (int64_t run = 0; run < piece.runs; ++run, to += piece.length) {
      decode_all<T, kSet>(heads + piece.starts[run], to, piece.length);
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
    if constexpr (!std::is_same_v<T, Float32>) encode_all<T, kSet>(to, heads + piece.starts[0], piece.elements());
    return;
  }
  for (int64_t head = 0; head < piece.heads; ++head, heads += stride) {
    for (int64_t run = 0; run < piece.runs; ++run, to += piece.length) {
      encode_all<T, kSet>(to, heads + piece.starts[run], piece.length);
    }
  }
}

// A token of a sequence.
struct TokenIndex {
  int64_t sequence, token;
};

// The cosines and sines of a token for the pairs of a piece. If the elements of a pair are adjacent there are two of
// each, and the first sine is negative.
struct Angles {
  TokenIndex index = {-1, -1};
  int64_t pair = -1;
  Buffer cos, sin;
};

// Loads entries that are `stride` apart, times `first` and `second` for the elements of a pair.
template <class E, Instructions kSet>
INLINE void load_entries(const void* table, int64_t entry, int64_t stride, int64_t count, bool half, float first,
                         float second, float* to) {
  const auto* from = static_cast<const typename E::Storage*>(table) + entry;
  Buffer buffer;
  const float* entries = buffer.values;
  const bool alternate = stride == 2;
  if (stride != 1 && stride != 2) {
    for (int64_t i = 0; i < count; ++i) buffer.values[i] = E::decode(from[i * stride]);
  } else if constexpr (std::is_same_v<E, Float32>) {
    entries = from;
  } else {
    decode_all<E, kSet>(from, buffer.values, (count - 1) * stride + 1);
  }
  if (half && alternate) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = entries[2 * i] * second;
  } else if (half) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = entries[i] * second;
  } else if (alternate) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      to[2 * i] = entries[2 * i] * first;
      to[2 * i + 1] = entries[2 * i] * second;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      to[2 * i] = entries[i] * first;
      to[2 * i + 1] = entries[i] * second;
    }
  }
}

template <class E, Instructions kSet>
INLINE void load_angles(const Rotation& rotation, int64_t entry, int64_t count, Angles& angles) {
  const Tokens& table = rotation.table;
  const float sign = rotation.inverse ? -1.0f : 1.0f;
  load_entries<E, kSet>(table.cos, entry, table.pair_stride, count, rotation.half, 1.0f, 1.0f, angles.cos.values);
  load_entries<E, kSet>(table.sin, entry, table.pair_stride, count, rotation.half, -sign, sign, angles.sin.values);
}

// Loads the angles of a piece, unless they are there. Returns how many pairs are rotated: none in the prefix.
template <Instructions kSet>
INLINE int64_t load_angles(const Rotation& rotation, const TokenIndex& index, const Piece& piece, Angles& angles) {
  if (index.token < rotation.prefix || piece.pairs == 0) return 0;
  const bool loaded = index.sequence == angles.index.sequence && index.token == angles.index.token;
  if (loaded && piece.pair == angles.pair) return piece.pairs;
  angles.index = index;
  angles.pair = piece.pair;
  const Tokens& table = rotation.table;
  const int64_t entry = index.sequence * table.batch_stride + (index.token - rotation.prefix) * table.row_stride +
                        piece.pair * table.pair_stride;
  switch (table.type) {
    case Type::float32:
      load_angles<Float32, kSet>(rotation, entry, piece.pairs, angles);
      break;
    case Type::float16:
      load_angles<Float16, kSet>(rotation, entry, piece.pairs, angles);
      break;
    case Type::bfloat16:
      load_angles<BFloat16, kSet>(rotation, entry, piece.pairs, angles);
      break;
  }
  return piece.pairs;
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

// The factors of a piece of one side.
struct Factors {
  int64_t loaded = -1;  // the first element of the row that they belong to
  Buffer buffer;
};

// Returns the factors of a piece: of all its elements if a row is a token, else of one head.
template <class T, Instructions kSet>
INLINE const float* load_factors(const NormRotation& problem, const SideNorm& norm, Piece piece, Factors& factors) {
  if (!problem.per_token) piece.head = 0, piece.heads = 1;
  float* values = factors.buffer.values;
  const int64_t width = problem.rotation.width, first = piece.head * width + piece.starts[0];
  if (first == factors.loaded) return values;
  factors.loaded = first;
  if (norm.weight == nullptr) {
    std::fill_n(values, piece.elements(), 1.0f);
    return values;
  }
  const float* weight =
      norm.weight_type == Type::float32
          ? load<Float32, kSet>(static_cast<const float*>(norm.weight), width, piece, factors.buffer)
          : load<T, kSet>(static_cast<const typename T::Storage*>(norm.weight), width, piece, factors.buffer);
#pragma omp simd
  for (int64_t i = 0; i < piece.elements(); ++i) values[i] = weight[i] + problem.offset;
  return values;
}

// Returns the sum of `kCount` values, a power of two, added as a binary tree.
template <int64_t kCount>
INLINE float total(const float* values) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    float halves[kCount / 2];
#pragma omp simd
    for (int64_t i = 0; i < kCount / 2; ++i) halves[i] = values[i] + values[i + kCount / 2];
    return total<kCount / 2>(halves);
  }
}

// Returns the sum of term(i) of `count` elements.
template <class Term>
INLINE float sum_of(int64_t count, Term&& term) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
#pragma omp simd
  for (int64_t lane = 0; lane < count - i; ++lane) lanes[lane] += term(i + lane);
  return total<kLanes>(lanes);
}

INLINE float reciprocal_norm(double sum_of_squares, int64_t elements, float eps) {
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares / static_cast<double>(elements) + static_cast<double>(eps)));
}

// What is computed at a time: all heads of a token, or as many as fit a buffer, or one.
struct Group {
  int number;  // of the side
  TokenIndex index;
  int64_t head, heads;
};

// What the groups of a call share.
struct Shared {
  Angles angles;
  Factors factors[kMaxSides];
};

INLINE int64_t offset_of(const Strides& strides, const Group& group) {
  return group.index.sequence * strides.batch + group.index.token * strides.token + group.head * strides.head;
}

template <class T>
INLINE const typename T::Storage* heads_of(const void* data, const Strides& strides, const Group& group) {
  return static_cast<const typename T::Storage*>(data) + offset_of(strides, group);
}

template <class T>
INLINE typename T::Storage* results_of(const Side& side, const Group& group) {
  return static_cast<typename T::Storage*>(side.to) + offset_of(side.to_strides, group);
}

// Prefetches `count` elements of a head after the group, to be read (0) or written (1): those of the next group, where
// heads and tokens are adjacent.
template <int kWritten, class Storage>
INLINE void prefetch_next(const Storage* heads, int64_t stride, int64_t head, int64_t count) {
  constexpr int64_t kLine = 64;
  const auto* next = reinterpret_cast<const char*>(heads) + head * stride * static_cast<int64_t>(sizeof(Storage));
  for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(Storage)); i += kLine)
    __builtin_prefetch(next + i, kWritten);
}

// Calls `body(piece, rows, elements)` for the pieces of a group, with rows and elements of each in the piece.
template <class Body>
INLINE void for_each_piece(const NormRotation& problem, const Group& group, Body&& body) {
  const int64_t end = group.heads * problem.rotation.width;
  for (int64_t begin = 0; begin < end;) {
    const Piece piece = piece_at(problem.rotation, begin, end);
    const int64_t rows = problem.per_token ? 1 : piece.heads;
    body(piece, rows, piece.elements() / rows);
    begin += piece.elements();
  }
}

template <class T, Instructions kSet>
INLINE void norm_rotate_group(const NormRotation& problem, const Group& group, Shared& shared) {
  const Rotation& rotation = problem.rotation;
  const Side& side = rotation.sides[group.number];
  const auto* from = heads_of<T>(side.from, side.from_strides, group);
  Buffer x_buffer, normed;
  const float* x = nullptr;
  int64_t pieces = 0;
  double squares[kRows] = {};
  float rstds[kRows];
  for_each_piece(problem, group, [&](const Piece& piece, int64_t rows, int64_t elements) {
    x = load<T, kSet>(from, side.from_strides.head, piece, x_buffer);
    for (int64_t row = 0; row < rows; ++row) {
      const float* values = x + row * elements;
      squares[row] += static_cast<double>(sum_of(elements, [&](int64_t i) { return values[i] * values[i]; }));
    }
    ++pieces;
  });
  const int64_t rows = problem.per_token ? 1 : group.heads;
  for (int64_t row = 0; row < rows; ++row) {
    rstds[row] = reciprocal_norm(squares[row], problem.row_elements(group.number), problem.eps);
  }
  for_each_piece(problem, group, [&](const Piece& piece, int64_t rows, int64_t elements) {
    if (pieces > 1) x = load<T, kSet>(from, side.from_strides.head, piece, x_buffer);
    const float* factors =
        load_factors<T, kSet>(problem, problem.norms[group.number], piece, shared.factors[group.number]);
    const bool rounded = problem.rounded_before_weight && !std::is_same_v<T, Float32>;
    for (int64_t row = 0; row < rows; ++row) {
      const float *values = x + row * elements, rstd = rstds[row];
      float* to = normed.values + row * elements;
      prefetch_next<0>(from, side.from_strides.head, group.heads + row, elements);
      prefetch_next<1>(results_of<T>(side, group), side.to_strides.head, group.heads + row, elements);
      if (rounded) {
#pragma omp simd
        for (int64_t i = 0; i < elements; ++i)
          to[i] = round_to<T, kSet>(round_small<T, kSet>(values[i] * rstd) * factors[i]);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < elements; ++i) to[i] = round_to<T, kSet>(values[i] * rstd * factors[i]);
      }
    }
    const int64_t pairs = load_angles<kSet>(rotation, group.index, piece, shared.angles);
    store<T, kSet>(results_of<T>(side, group), side.to_strides.head, piece, normed, [&](float* to) {
      rotate_heads<kSet>(piece, pairs, rotation.half, shared.angles, normed.values, to);
    });
  });
}

// Adds the terms of `rows` rows to a part of the partial sums of a weight's gradient: as many as are `count`.
INLINE void add_products(const float* x, const float* grad, const float* rstds, int64_t rows, int64_t elements,
                         int64_t count, float* partial) {
  static_assert(kRowsAdded == 4);
  int64_t row = 0;
  for (; row + kRowsAdded <= rows; row += kRowsAdded) {
    const float *x0 = x + row * elements, *x1 = x0 + elements, *x2 = x1 + elements, *x3 = x2 + elements;
    const float *grad0 = grad + row * elements, *grad1 = grad0 + elements, *grad2 = grad1 + elements,
                *grad3 = grad2 + elements;
    const float rstd0 = rstds[row], rstd1 = rstds[row + 1], rstd2 = rstds[row + 2], rstd3 = rstds[row + 3];
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      partial[i] += (grad0[i] * (x0[i] * rstd0) + grad1[i] * (x1[i] * rstd1)) +
                    (grad2[i] * (x2[i] * rstd2) + grad3[i] * (x3[i] * rstd3));
    }
  }
  for (; row < rows; ++row) {
    const float *values = x + row * elements, *grads = grad + row * elements, rstd = rstds[row];
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) partial[i] += grads[i] * (values[i] * rstd);
  }
}

// Adds the terms of the weight's gradient to `partial`, if that is not null.
template <class T, Instructions kSet>
INLINE void differentiate_group(const NormRotation& problem, const Group& group, Shared& shared, float* partial) {
  const Rotation& rotation = problem.rotation;
  const Side& side = rotation.sides[group.number];
  const SideNorm& norm = problem.norms[group.number];
  const int64_t row_elements = problem.row_elements(group.number);
  Buffer x_buffer, grad_buffer;
  const float *x = nullptr, *factors = nullptr, *grad = grad_buffer.values;
  // Loads x, the factors, and the gradient of the normalized x.
  const auto load_all = [&](const Piece& piece) __attribute__((always_inline)) {
    const auto* grads = heads_of<T>(side.from, side.from_strides, group);
    x = load<T, kSet>(heads_of<T>(norm.x, norm.x_strides, group), norm.x_strides.head, piece, x_buffer);
    factors = load_factors<T, kSet>(problem, norm, piece, shared.factors[group.number]);
    const float* rotated = load<T, kSet>(grads, side.from_strides.head, piece, grad_buffer);
    const int64_t pairs = load_angles<kSet>(rotation, group.index, piece, shared.angles);
    rotate_heads<kSet>(piece, pairs, rotation.half, shared.angles, rotated, grad_buffer.values);
  };
  int64_t pieces = 0;
  double squares[kRows] = {}, products[kRows] = {};
  float rstds[kRows], projections[kRows];
  for_each_piece(problem, group, [&](const Piece& piece, int64_t rows, int64_t elements) {
    load_all(piece);
    for (int64_t row = 0; row < rows; ++row) {
      const float *values = x + row * elements, *grads = grad + row * elements;
      squares[row] += static_cast<double>(sum_of(elements, [&](int64_t i) { return values[i] * values[i]; }));
      products[row] +=
          static_cast<double>(sum_of(elements, [&](int64_t i) { return values[i] * (grads[i] * factors[i]); }));
    }
    ++pieces;
  });
  const int64_t rows = problem.per_token ? 1 : group.heads;
  for (int64_t row = 0; row < rows; ++row) {
    const float rstd = reciprocal_norm(squares[row], row_elements, problem.eps);
    rstds[row] = rstd;
    projections[row] = rstd * rstd * static_cast<float>(products[row] / static_cast<double>(row_elements));
  }
  for_each_piece(problem, group, [&](const Piece& piece, int64_t rows, int64_t elements) {
    if (pieces > 1) load_all(piece);
    if (partial != nullptr) {
      float* sums = partial + (problem.per_token ? piece.head * rotation.width : 0);
      const int64_t count = elements / piece.runs;
      for (int64_t run = 0; run < piece.runs; ++run) {
        add_products(x + run * count, grad + run * count, rstds, rows, elements, count, sums + piece.starts[run]);
      }
    }
    store<T, kSet>(results_of<T>(side, group), side.to_strides.head, piece, x_buffer, [&](float* to) {
      for (int64_t row = 0; row < rows; ++row) {
        const float *values = x + row * elements, *grads = grad + row * elements;
        const float rstd = rstds[row], projection = projections[row];
        float* results = to + row * elements;
        prefetch_next<0>(heads_of<T>(side.from, side.from_strides, group), side.from_strides.head, group.heads + row,
                         elements);
        prefetch_next<0>(heads_of<T>(norm.x, norm.x_strides, group), norm.x_strides.head, group.heads + row, elements);
        prefetch_next<1>(results_of<T>(side, group), side.to_strides.head, group.heads + row, elements);
#pragma omp simd
        for (int64_t i = 0; i < elements; ++i) results[i] = rstd * (grads[i] * factors[i] - values[i] * projection);
      }
    });
  });
}

// Calls `body(group)` for the groups of the tokens [begin, end).
template <class Body>
INLINE void for_each_group(const NormRotation& problem, int64_t begin, int64_t end, Body&& body) {
  const Rotation& rotation = problem.rotation;
  const int64_t most = std::clamp<int64_t>(kBuffer / std::max<int64_t>(rotation.width, 1), 1, kRows);
  for (int64_t i = begin; i < end; ++i) {
    const TokenIndex index{i / rotation.tokens, i % rotation.tokens};
    for (int number = 0; number < kMaxSides; ++number) {
      if (problem.row_elements(number) == 0) continue;
      const int64_t heads = rotation.sides[number].heads, step = problem.per_token ? heads : most;
      for (int64_t head = 0; head < heads; head += step) {
        body(Group{number, index, head, std::min(step, heads - head)});
      }
    }
  }
}

template <class T, Instructions kSet>
INLINE void run_tokens(const NormRotation& problem, int64_t begin, int64_t end) {
  Shared shared;
  for_each_group(problem, begin, end, [&](const Group& group) { norm_rotate_group<T, kSet>(problem, group, shared); });
}

template <class T, Instructions kSet>
INLINE void run_parts(const NormRotation& problem, int64_t begin, int64_t end) {
  const int64_t tokens = problem.rotation.batch * problem.rotation.tokens;
  Shared shared;
  for (int64_t part = begin; part < end; ++part) {
    float* partials[kMaxSides] = {};
    for (int side = 0; side < kMaxSides; ++side) {
      const int64_t elements = problem.row_elements(side);
      if (problem.norms[side].partial == nullptr) continue;
      partials[side] = problem.norms[side].partial + part * elements;
      std::fill_n(partials[side], elements, 0.0f);
    }
    const int64_t share = tokens / problem.parts, longer = tokens % problem.parts;
    const int64_t first = part * share + std::min(part, longer), last = first + share + (part < longer ? 1 : 0);
    for_each_group(problem, first, last, [&](const Group& group) {
      differentiate_group<T, kSet>(problem, group, shared, partials[group.number]);
    });
  }
}

template <class T, Instructions kSet, bool kBackward>
INLINE void run_set(const NormRotation& problem, int64_t begin, int64_t end) {
  if constexpr (kBackward) {
    run_parts<T, kSet>(problem, begin, end);
  } else {
    run_tokens<T, kSet>(problem, begin, end);
  }
}

#if defined(__x86_64__)
template <class T, bool kBackward>
__attribute__((target("avx2,fma"))) void run_avx2(const NormRotation& problem, int64_t begin, int64_t end) {
  run_set<T, Instructions::avx2, kBackward>(problem, begin, end);
}
template <class T, bool kBackward>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void run_avx512(
    const NormRotation& problem, int64_t begin, int64_t end) {
  run_set<T, Instructions::avx512, kBackward>(problem, begin, end);
}
#endif

template <class T, bool kBackward>
void run_with_type(const NormRotation& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (has_avx512()) return run_avx512<T, kBackward>(problem, begin, end);
  if (has_avx2()) return run_avx2<T, kBackward>(problem, begin, end);
#endif
  run_set<T, Instructions::base, kBackward>(problem, begin, end);
}

template <bool kBackward>
void run(const NormRotation& problem, int64_t begin, int64_t end) {
  switch (problem.rotation.type) {
    case Type::float32:
      return run_with_type<Float32, kBackward>(problem, begin, end);
    case Type::float16:
      return run_with_type<Float16, kBackward>(problem, begin, end);
    case Type::bfloat16:
      return run_with_type<BFloat16, kBackward>(problem, begin, end);
  }
}

// Adds the partial sums as a binary tree, in place.
template <class W>
void reduce_elements(const NormRotation& problem, int side, int64_t begin, int64_t end) {
  const SideNorm& norm = problem.norms[side];
  const int64_t elements = problem.row_elements(side);
  for (int64_t distance = 1; distance < problem.parts; distance *= 2) {
    for (int64_t part = 0; part + distance < problem.parts; part += 2 * distance) {
      float* __restrict__ sums = norm.partial + part * elements;
      const float* __restrict__ others = sums + distance * elements;
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) sums[i] += others[i];
    }
  }
  auto* __restrict__ to = static_cast<typename W::Storage*>(norm.grad_weight);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) to[i] = W::encode(norm.partial[i]);
}

}  // namespace

void norm_rotate(const NormRotation& problem, int64_t begin, int64_t end) { run<false>(problem, begin, end); }

int64_t norm_partial_sums(const NormRotation& problem) {
  const int64_t tokens = problem.rotation.batch * problem.rotation.tokens;
  const int64_t rows = std::max<int64_t>(problem.rows_per_token(0), problem.rows_per_token(1));
  const int64_t of_part = std::max<int64_t>(kAdditions / ((rows + kRowsAdded - 1) / kRowsAdded), 1);
  return std::min<int64_t>(tokens, std::max<int64_t>(tokens / of_part, 64));
}

void norm_rotate_backward(const NormRotation& problem, int64_t begin, int64_t end) { run<true>(problem, begin, end); }

void reduce_norm_weight(const NormRotation& problem, int side, int64_t begin, int64_t end) {
  switch (problem.norms[side].weight_type) {
    case Type::float32:
      return reduce_elements<Float32>(problem, side, begin, end);
    case Type::float16:
      return reduce_elements<Float16>(problem, side, begin, end);
    case Type::bfloat16:
      return reduce_elements<BFloat16>(problem, side, begin, end);
  }
}

}  // namespace rope3d
