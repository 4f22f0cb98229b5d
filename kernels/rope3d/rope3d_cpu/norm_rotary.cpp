// RMSNorm and rotary embedding in one pass, on the CPU.
//
// Reads:    q and k, or them and the gradients of the results; the weights, and the tables of cosines and sines.
// Writes:   the results, or the gradients and the partial sums of those of the weights.
// Must not: start threads, allocate, or keep state between calls.
//
// A few rows of a token at a time are decoded into buffers of floats that stay in the L1 cache; a row that does not fit
// is decoded in pieces, twice. The cosines and sines of a token are loaded once for all its heads, and the factors once
// for all tokens of a call. The loops over a buffer vectorize; they are compiled once per instruction set, and one is
// selected at run time.
#include "rope3d_cpu/norm_rotary.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "rope3d_cpu/norm_angles.h"
#include "rope3d_cpu/norm_pieces.h"

namespace rope3d {
namespace {

// Rows that are processed together. While these are computed, those of the next group are fetched from memory: with 32
// rows of 128 elements a call took up to 1.4 times as long (EPYC, one thread).
constexpr int64_t kRows = 8;

// Sums of the elements of a row that are kept in registers, so that an addition need not wait for the one before it.
constexpr int64_t kLanes = 32;

// Additions to a partial sum of a weight's gradient, and the rows of a token that one of them adds. A longer float32
// sum would have a larger error than the rounding of a result.
constexpr int64_t kAdditions = 16;
constexpr int64_t kRowsAdded = 4;

// The factors of a piece of one side.
struct Factors {
  int64_t loaded = -1;  // the first element of the row that they belong to
  Buffer buffer;
};

// Returns the factors of a piece: of all its elements if a row is a token, else of one head.
template <class T, Instructions kSet>
INLINE const float* load_factors(const NormRotation& problem, const SideNorm& norm, Piece piece, Factors& factors) {
  if (!problem.per_token) {
    piece.head = 0;
    piece.heads = 1;
  }
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

// The unit of computation: heads of a token and side, at most kRows rows.
struct Group {
  int number;  // of the side
  TokenIndex index;
  int64_t head, heads;
  bool last;  // of the token and side
};

// The shared data of a call's groups.
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

// Prefetches a row of the next group's piece that corresponds to this one, to be read (0) or written (1). `heads` are
// those of this group. It is called between rows: prefetching all of them at once takes up to 1.15 times as long.
template <int kWritten, class Storage>
INLINE void prefetch_next(const Storage* heads, const Strides& strides, const Group& group, const Piece& piece,
                          int64_t row, int64_t rows) {
  constexpr int64_t kLine = 64, kSize = sizeof(Storage);
  const int64_t first = group.last ? strides.token - group.head * strides.head : group.heads * strides.head;
  const int64_t of_row = piece.heads / rows, head = piece.head + row * of_row;
  const auto* next = reinterpret_cast<const char*>(heads) + (first + head * strides.head + piece.starts[0]) * kSize;
  for (int64_t i = 0; i < of_row; ++i, next += strides.head * kSize) {
    for (int64_t byte = 0; byte < piece.length * kSize; byte += kLine) __builtin_prefetch(next + byte, kWritten);
  }
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
  auto* results = results_of<T>(side, group);
  Buffer x_buffer, normed;
  const float* x = nullptr;
  int64_t pieces = 0;
  double squares[kRows] = {};
  float rstds[kRows];
  for_each_piece(problem, group, [&](const Piece& piece, int64_t rows, int64_t elements) ALWAYS_INLINE {
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
  for_each_piece(problem, group, [&](const Piece& piece, int64_t rows, int64_t elements) ALWAYS_INLINE {
    if (pieces > 1) x = load<T, kSet>(from, side.from_strides.head, piece, x_buffer);
    const float* factors =
        load_factors<T, kSet>(problem, problem.norms[group.number], piece, shared.factors[group.number]);
    const bool rounded = problem.rounded_before_weight && !std::is_same_v<T, Float32>;
    for (int64_t row = 0; row < rows; ++row) {
      const float *values = x + row * elements, rstd = rstds[row];
      float* to = normed.values + row * elements;
      prefetch_next<0>(from, side.from_strides, group, piece, row, rows);
      prefetch_next<1>(results, side.to_strides, group, piece, row, rows);
      if (rounded) {
#pragma omp simd
        for (int64_t i = 0; i < elements; ++i) {
          to[i] = round_to<T, kSet>(round_small<T, kSet>(values[i] * rstd) * factors[i]);
        }
      } else {
#pragma omp simd
        for (int64_t i = 0; i < elements; ++i) to[i] = round_to<T, kSet>(values[i] * rstd * factors[i]);
      }
    }
    const int64_t pairs = load_angles<kSet>(rotation, group.index, piece, shared.angles);
    store<T, kSet>(results, side.to_strides.head, piece, normed, [&](float* to) ALWAYS_INLINE {
      rotate_heads<kSet>(piece, pairs, rotation.half, shared.angles, normed.values, to);
    });
  });
}

// Adds the terms of `rows` rows, `elements` apart, to `count` partial sums of a weight's gradient.
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
  const auto* xs = heads_of<T>(norm.x, norm.x_strides, group);
  const auto* grads = heads_of<T>(side.from, side.from_strides, group);
  auto* results = results_of<T>(side, group);
  Buffer x_buffer, grad_buffer;
  const float *x = nullptr, *factors = nullptr, *grad = grad_buffer.values;
  // Loads x, the factors, and the gradient of the normalized x.
  const auto load_all = [&](const Piece& piece) ALWAYS_INLINE {
    x = load<T, kSet>(xs, norm.x_strides.head, piece, x_buffer);
    factors = load_factors<T, kSet>(problem, norm, piece, shared.factors[group.number]);
    const float* rotated = load<T, kSet>(grads, side.from_strides.head, piece, grad_buffer);
    const int64_t pairs = load_angles<kSet>(rotation, group.index, piece, shared.angles);
    rotate_heads<kSet>(piece, pairs, rotation.half, shared.angles, rotated, grad_buffer.values);
  };
  int64_t pieces = 0;
  double squares[kRows] = {}, products[kRows] = {};
  float rstds[kRows], projections[kRows];
  for_each_piece(problem, group, [&](const Piece& piece, int64_t rows, int64_t elements) ALWAYS_INLINE {
    load_all(piece);
    for (int64_t row = 0; row < rows; ++row) {
      const float *values = x + row * elements, *of_row = grad + row * elements;
      squares[row] += static_cast<double>(sum_of(elements, [&](int64_t i) { return values[i] * values[i]; }));
      products[row] +=
          static_cast<double>(sum_of(elements, [&](int64_t i) { return values[i] * (of_row[i] * factors[i]); }));
    }
    ++pieces;
  });
  const int64_t rows = problem.per_token ? 1 : group.heads;
  for (int64_t row = 0; row < rows; ++row) {
    const float rstd = reciprocal_norm(squares[row], row_elements, problem.eps);
    rstds[row] = rstd;
    projections[row] = rstd * rstd * static_cast<float>(products[row] / static_cast<double>(row_elements));
  }
  for_each_piece(problem, group, [&](const Piece& piece, int64_t rows, int64_t elements) ALWAYS_INLINE {
    if (pieces > 1) load_all(piece);
    if (partial != nullptr) {
      float* sums = partial + (problem.per_token ? piece.head * rotation.width : 0);
      const int64_t count = elements / piece.runs;
      for (int64_t run = 0; run < piece.runs; ++run) {
        add_products(x + run * count, grad + run * count, rstds, rows, elements, count, sums + piece.starts[run]);
      }
    }
    store<T, kSet>(results, side.to_strides.head, piece, x_buffer, [&](float* to) ALWAYS_INLINE {
      for (int64_t row = 0; row < rows; ++row) {
        const float *values = x + row * elements, *of_row = grad + row * elements;
        const float rstd = rstds[row], projection = projections[row];
        float* of_x = to + row * elements;
        prefetch_next<0>(xs, norm.x_strides, group, piece, row, rows);
        prefetch_next<0>(grads, side.from_strides, group, piece, row, rows);
        prefetch_next<1>(results, side.to_strides, group, piece, row, rows);
#pragma omp simd
        for (int64_t i = 0; i < elements; ++i) of_x[i] = rstd * (of_row[i] * factors[i] - values[i] * projection);
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
        body(Group{number, index, head, std::min(step, heads - head), head + step >= heads});
      }
    }
  }
}

template <class T, Instructions kSet>
INLINE void run_tokens(const NormRotation& problem, int64_t begin, int64_t end) {
  Shared shared;
  for_each_group(problem, begin, end,
                 [&](const Group& group) ALWAYS_INLINE { norm_rotate_group<T, kSet>(problem, group, shared); });
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
    for_each_group(problem, first, last, [&](const Group& group) ALWAYS_INLINE {
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
__attribute__((target("avx2,fma,f16c"))) void run_avx2(const NormRotation& problem, int64_t begin, int64_t end) {
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
