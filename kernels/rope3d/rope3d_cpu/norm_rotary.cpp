// RMSNorm and rotary embedding in one pass, on the CPU.
//
// Reads:    q and k, or them and the gradients of the results, each twice, the second time from the cache; the weights,
//           and the tables of cosines and sines.
// Writes:   the results, or the gradients and the partial sums of those of the weights.
// Must not: start threads, allocate, or keep state between calls.
//
// Pairs of a head are processed in blocks, whose elements are decoded into buffers of floats. The loops over a buffer
// vectorize; they are compiled once per instruction set, and one is selected at run time.
#include "rope3d_cpu/norm_rotary.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kit/cpu.h"

namespace rope3d {
namespace {

using namespace kit;

enum class Instructions { base, avx2, avx512 };

constexpr int64_t kPairBlock = 128;
constexpr int64_t kTokensOfPart = 32;  // a longer float32 sum would have a larger error than the rounding of a result

// Up to kPairBlock pairs: first the elements of a and then those of b, (a, b) being a pair.
struct PairBlock {
  float a[kPairBlock], b[kPairBlock];
};

// A block of pairs of a head.
struct Block {
  int64_t count;
  int64_t first, second;  // elements of the first pair
  bool adjacent;          // the elements of a pair are adjacent, else those of a are, and those of b
  bool rotated;
};

// Returns the block that starts at a pair of a head. The pairs that are rotated come first.
INLINE Block block_at(const Rotation& rotation, int64_t pair) {
  const int64_t pairs = rotation.pairs;
  if (pair < pairs) {
    const int64_t count = std::min(kPairBlock, pairs - pair);
    if (rotation.half) return {count, pair, pair + pairs, false, true};
    return {count, 2 * pair, 2 * pair + 1, true, true};
  }
  return {std::min(kPairBlock, rotation.width / 2 - pair), 2 * pair, 2 * pair + 1, true, false};
}

template <class T, Instructions kSet>
INLINE void decode_all(const typename T::Storage* from, float* to, int64_t count) {
  if constexpr (std::is_same_v<T, Float16> && kSet != Instructions::base) {
    float16_to_floats(from, to, count);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = T::decode(from[i]);
  }
}

template <class T, Instructions kSet>
INLINE void encode_all(const float* from, typename T::Storage* to, int64_t count) {
  if constexpr (std::is_same_v<T, Float16> && kSet != Instructions::base) {
    floats_to_float16(from, to, count);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = T::encode(from[i]);
  }
}

template <class T, Instructions kSet>
INLINE void load_block(const Block& block, const typename T::Storage* head, PairBlock& values) {
  if (block.adjacent) {
    float pairs[2 * kPairBlock];
    decode_all<T, kSet>(head + block.first, pairs, 2 * block.count);
#pragma omp simd
    for (int64_t i = 0; i < block.count; ++i) {
      values.a[i] = pairs[2 * i];
      values.b[i] = pairs[2 * i + 1];
    }
  } else {
    decode_all<T, kSet>(head + block.first, values.a, block.count);
    decode_all<T, kSet>(head + block.second, values.b, block.count);
  }
}

template <class T, Instructions kSet>
INLINE void store_block(const Block& block, const PairBlock& values, typename T::Storage* head) {
  if (block.adjacent) {
    float pairs[2 * kPairBlock];
#pragma omp simd
    for (int64_t i = 0; i < block.count; ++i) {
      pairs[2 * i] = values.a[i];
      pairs[2 * i + 1] = values.b[i];
    }
    encode_all<T, kSet>(pairs, head + block.first, 2 * block.count);
  } else {
    encode_all<T, kSet>(values.a, head + block.first, block.count);
    encode_all<T, kSet>(values.b, head + block.second, block.count);
  }
}

template <class T, Instructions kSet>
INLINE void round_all(float* values, int64_t count) {
  if constexpr (std::is_same_v<T, Float32>) return;
  typename T::Storage rounded[kPairBlock];
  encode_all<T, kSet>(values, rounded, count);
  decode_all<T, kSet>(rounded, values, count);
}

// The cosines and sines of a block; 1 and 0 if it is not rotated.
template <class E>
INLINE void load_entries(const Tokens& table, int64_t entry, int64_t count, PairBlock& angles) {
  const auto* cos = static_cast<const typename E::Storage*>(table.cos) + entry;
  const auto* sin = static_cast<const typename E::Storage*>(table.sin) + entry;
  for (int64_t i = 0; i < count; ++i) {
    angles.a[i] = E::decode(cos[i * table.pair_stride]);
    angles.b[i] = E::decode(sin[i * table.pair_stride]);
  }
}

// Whose rows a part or a call has: a token of a sequence.
struct TokenIndex {
  int64_t sequence, token;
};

INLINE void load_angles(const Rotation& rotation, const TokenIndex& index, int64_t pair, const Block& block,
                        PairBlock& angles) {
  if (!block.rotated || index.token < rotation.prefix) {
    std::fill_n(angles.a, block.count, 1.0f);
    std::fill_n(angles.b, block.count, 0.0f);
    return;
  }
  const Tokens& table = rotation.table;
  const int64_t entry = index.sequence * table.batch_stride + (index.token - rotation.prefix) * table.row_stride +
                        pair * table.pair_stride;
  switch (table.type) {
    case Type::float32:
      return load_entries<Float32>(table, entry, block.count, angles);
    case Type::float16:
      return load_entries<Float16>(table, entry, block.count, angles);
    case Type::bfloat16:
      return load_entries<BFloat16>(table, entry, block.count, angles);
  }
}

template <class T, Instructions kSet>
INLINE void load_factors(const NormRotation& problem, const SideNorm& norm, const Block& block, int64_t head_in_row,
                         PairBlock& factors) {
  if (norm.weight == nullptr) {
    std::fill_n(factors.a, block.count, 1.0f);
    std::fill_n(factors.b, block.count, 1.0f);
    return;
  }
  const int64_t first = head_in_row * problem.rotation.width;
  if (norm.weight_type == Type::float32) {
    load_block<Float32, kSet>(block, static_cast<const float*>(norm.weight) + first, factors);
  } else {
    load_block<T, kSet>(block, static_cast<const typename T::Storage*>(norm.weight) + first, factors);
  }
#pragma omp simd
  for (int64_t i = 0; i < block.count; ++i) {
    factors.a[i] += problem.offset;
    factors.b[i] += problem.offset;
  }
}

INLINE int64_t offset_of(const Strides& strides, const TokenIndex& index, int64_t head) {
  return index.sequence * strides.batch + index.token * strides.token + head * strides.head;
}

template <class T>
INLINE const typename T::Storage* head_of(const void* data, const Strides& strides, const TokenIndex& index,
                                          int64_t head) {
  return static_cast<const typename T::Storage*>(data) + offset_of(strides, index, head);
}

INLINE float reciprocal_norm(double sum_of_squares, int64_t elements, float eps) {
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares / static_cast<double>(elements) + static_cast<double>(eps)));
}

// Calls `body(block, pair)` for the blocks of a head.
template <class Body>
INLINE void for_each_block(const Rotation& rotation, Body&& body) {
  for (int64_t pair = 0; pair < rotation.width / 2;) {
    const Block block = block_at(rotation, pair);
    body(block, pair);
    pair += block.count;
  }
}

template <class T, Instructions kSet>
INLINE void norm_rotate_row(const NormRotation& problem, int number, const TokenIndex& index, int64_t first_head) {
  const Rotation& rotation = problem.rotation;
  const Side& side = rotation.sides[number];
  const int64_t heads = problem.heads_per_row(number);
  const bool rounded = problem.rounded_before_weight;
  double squares = 0.0;
  for (int64_t head = 0; head < heads; ++head) {
    const auto* from = head_of<T>(side.from, side.from_strides, index, first_head + head);
    for_each_block(rotation, [&](const Block& block, int64_t) {
      PairBlock values;
      load_block<T, kSet>(block, from, values);
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < block.count; ++i) sum += values.a[i] * values.a[i] + values.b[i] * values.b[i];
      squares += static_cast<double>(sum);
    });
  }
  const float rstd = reciprocal_norm(squares, problem.row_elements(number), problem.eps);
  for (int64_t head = 0; head < heads; ++head) {
    const auto* from = head_of<T>(side.from, side.from_strides, index, first_head + head);
    auto* to = static_cast<typename T::Storage*>(side.to) + offset_of(side.to_strides, index, first_head + head);
    for_each_block(rotation, [&](const Block& block, int64_t pair) {
      PairBlock values, factors, angles;
      load_block<T, kSet>(block, from, values);
      load_factors<T, kSet>(problem, problem.norms[number], block, head, factors);
      load_angles(rotation, index, pair, block, angles);
#pragma omp simd
      for (int64_t i = 0; i < block.count; ++i) {
        values.a[i] *= rstd;
        values.b[i] *= rstd;
      }
      if (rounded) round_all<T, kSet>(values.a, block.count);
      if (rounded) round_all<T, kSet>(values.b, block.count);
#pragma omp simd
      for (int64_t i = 0; i < block.count; ++i) {
        values.a[i] *= factors.a[i];
        values.b[i] *= factors.b[i];
      }
      round_all<T, kSet>(values.a, block.count);
      round_all<T, kSet>(values.b, block.count);
#pragma omp simd
      for (int64_t i = 0; i < block.count; ++i) {
        const float a = values.a[i], b = values.b[i];
        values.a[i] = a * angles.a[i] - b * angles.b[i];
        values.b[i] = a * angles.b[i] + b * angles.a[i];
      }
      store_block<T, kSet>(block, values, to);
    });
  }
}

// What the backward pass needs of a block: x, the gradient of the normalized x, and the factors.
struct BackwardBlock {
  PairBlock x, grad, factors;
};

template <class T, Instructions kSet>
INLINE void load_backward(const NormRotation& problem, int number, const TokenIndex& index, int64_t first_head,
                          int64_t head, const Block& block, int64_t pair, BackwardBlock& loaded) {
  const Side& side = problem.rotation.sides[number];
  const SideNorm& norm = problem.norms[number];
  PairBlock angles;
  load_block<T, kSet>(block, head_of<T>(norm.x, norm.x_strides, index, first_head + head), loaded.x);
  load_block<T, kSet>(block, head_of<T>(side.from, side.from_strides, index, first_head + head), loaded.grad);
  load_factors<T, kSet>(problem, norm, block, head, loaded.factors);
  load_angles(problem.rotation, index, pair, block, angles);
#pragma omp simd
  for (int64_t i = 0; i < block.count; ++i) {
    const float a = loaded.grad.a[i], b = loaded.grad.b[i];
    loaded.grad.a[i] = a * angles.a[i] + b * angles.b[i];
    loaded.grad.b[i] = b * angles.a[i] - a * angles.b[i];
  }
}

// Adds the row's terms of the weight's gradient to `partial`, if that is not null.
template <class T, Instructions kSet>
INLINE void differentiate_row(const NormRotation& problem, int number, const TokenIndex& index, int64_t first_head,
                              float* partial) {
  const Rotation& rotation = problem.rotation;
  const Side& side = rotation.sides[number];
  const int64_t heads = problem.heads_per_row(number), elements = problem.row_elements(number);
  double squares = 0.0, products = 0.0;
  for (int64_t head = 0; head < heads; ++head) {
    for_each_block(rotation, [&](const Block& block, int64_t pair) {
      BackwardBlock loaded;
      load_backward<T, kSet>(problem, number, index, first_head, head, block, pair, loaded);
      const auto& [x, grad, factors] = loaded;
      float square = 0.0f, product = 0.0f;
#pragma omp simd reduction(+ : square, product)
      for (int64_t i = 0; i < block.count; ++i) {
        square += x.a[i] * x.a[i] + x.b[i] * x.b[i];
        product += x.a[i] * (grad.a[i] * factors.a[i]) + x.b[i] * (grad.b[i] * factors.b[i]);
      }
      squares += static_cast<double>(square);
      products += static_cast<double>(product);
    });
  }
  const float rstd = reciprocal_norm(squares, elements, problem.eps);
  const float projection = rstd * rstd * static_cast<float>(products / static_cast<double>(elements));
  for (int64_t head = 0; head < heads; ++head) {
    auto* to = static_cast<typename T::Storage*>(side.to) + offset_of(side.to_strides, index, first_head + head);
    for_each_block(rotation, [&](const Block& block, int64_t pair) {
      BackwardBlock loaded;
      load_backward<T, kSet>(problem, number, index, first_head, head, block, pair, loaded);
      auto& [x, grad, factors] = loaded;
      if (partial != nullptr) {
        PairBlock sums;
        float* of_head = partial + head * rotation.width;
        load_block<Float32, kSet>(block, of_head, sums);
#pragma omp simd
        for (int64_t i = 0; i < block.count; ++i) {
          sums.a[i] += grad.a[i] * (x.a[i] * rstd);
          sums.b[i] += grad.b[i] * (x.b[i] * rstd);
        }
        store_block<Float32, kSet>(block, sums, of_head);
      }
#pragma omp simd
      for (int64_t i = 0; i < block.count; ++i) {
        x.a[i] = rstd * (grad.a[i] * factors.a[i] - x.a[i] * projection);
        x.b[i] = rstd * (grad.b[i] * factors.b[i] - x.b[i] * projection);
      }
      store_block<T, kSet>(block, x, to);
    });
  }
}

// Calls `row(side, token, first head)` for the rows of the tokens [begin, end).
template <class Row>
INLINE void for_each_row(const NormRotation& problem, int64_t begin, int64_t end, Row&& row) {
  const int64_t tokens = problem.rotation.tokens;
  for (int64_t i = begin; i < end; ++i) {
    const TokenIndex index{i / tokens, i % tokens};
    for (int side = 0; side < kMaxSides; ++side) {
      if (problem.row_elements(side) == 0) continue;
      for (int64_t head = 0; head < problem.rows_per_token(side); ++head) row(side, index, head);
    }
  }
}

template <class T, Instructions kSet>
INLINE void run_tokens(const NormRotation& problem, int64_t begin, int64_t end) {
  for_each_row(problem, begin, end, [&](int side, const TokenIndex& index, int64_t head) {
    norm_rotate_row<T, kSet>(problem, side, index, head);
  });
}

template <class T, Instructions kSet>
INLINE void run_parts(const NormRotation& problem, int64_t begin, int64_t end) {
  const int64_t tokens = problem.rotation.batch * problem.rotation.tokens;
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
    for_each_row(problem, first, last, [&](int side, const TokenIndex& index, int64_t head) {
      differentiate_row<T, kSet>(problem, side, index, head, partials[side]);
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
  return std::min<int64_t>(tokens, std::max<int64_t>(tokens / kTokensOfPart, 64));
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
