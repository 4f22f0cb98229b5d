// Attention of one token per sequence on the CPU.
//
// Reads:    the keys and values of the tokens that the mask includes, once per group of at most kMostQueries queries.
// Writes:   `out` of the groups `begin` to `end`, and the new token in the cache.
// Must not: start threads, allocate, or keep state between calls.
//
// A group is of query heads that read the same keys. It goes through the tokens in blocks, with the maximum, the sum of
// the weights and that of the weighted values so far, which are rescaled where a block has a larger maximum. Functions
// are compiled for AVX2 and dispatched at run time. Results may differ between instruction sets in the last bit.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "decode_cpu/decode.h"
#include "decode_cpu/vectors.h"
#include "kit/cpu.h"

namespace decode_step {
namespace {

using namespace kit;

constexpr int kMostQueries = 8;       // of a group
constexpr int64_t kMostElements = 256;
constexpr int64_t kTokens = 64;       // of a block

int64_t parts_of(const Attention& problem) {
  return (problem.query_heads / problem.key_heads + kMostQueries - 1) / kMostQueries;
}

// 2^x for x <= 0, to a unit in the last place; 0 below -126. NaN stays NaN.
INLINE float exp2_of(float x) {
  x = -127.0f > x ? -127.0f : x;
  constexpr float kMagic = 0x1.8p23f;  // adding it rounds to an integer, which then stands in the low bits
  const float shifted = x + kMagic, rest = x - (shifted - kMagic);
  const auto power = bit_cast<float>((bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u);
  float slope = 1.535336196e-04f;
  slope = slope * rest + 1.339887502e-03f;
  slope = slope * rest + 9.618436918e-03f;
  slope = slope * rest + 5.550332367e-02f;
  slope = slope * rest + 2.402264774e-01f;
  slope = slope * rest + 6.931471825e-01f;
  return power + power * (rest * slope);
}

// The tokens of a block that are read.
template <class T>
struct Block {
  const typename T::Storage *keys[kTokens], *values[kTokens];
  int count = 0;
};

template <class T>
INLINE typename T::Storage* row_of(const Heads& heads, int64_t batch, int64_t head, int64_t token = 0) {
  return static_cast<typename T::Storage*>(heads.data) + batch * heads.batch_stride + head * heads.head_stride +
         token * heads.token_stride;
}

template <class T>
INLINE void collect(const Attention& problem, int64_t batch, int64_t head, int64_t first, Block<T>& block) {
  block.count = 0;
  const bool* mask = problem.mask == nullptr ? nullptr : problem.mask + batch * problem.mask_stride;
  for (int64_t token = first; token < std::min(first + kTokens, problem.tokens); ++token) {
    if (mask != nullptr && !mask[token]) continue;
    // The new token is not read from the cache, to which another group may be writing it.
    const bool is_new = problem.position != nullptr && token == *problem.position;
    block.keys[block.count] = is_new ? row_of<T>(problem.new_key, batch, head) : row_of<T>(problem.key, batch, head, token);
    block.values[block.count] =
        is_new ? row_of<T>(problem.new_value, batch, head) : row_of<T>(problem.value, batch, head, token);
    ++block.count;
  }
}

// The state of a group.
template <int kQueries>
struct State {
  float queries[kQueries][kMostElements];  // times scale * log2(e)
  float sums[kQueries][kMostElements] = {};  // of the weighted values
  float weights[kQueries][kTokens];  // of the tokens of a block; scores before
  float maxima[kQueries], totals[kQueries] = {};
};

template <class T, int kLanes, int kQueries>
INLINE void score(State<kQueries>& state, const Block<T>& block, int64_t elements) {
  using Vector = Vector<kLanes>;
  for (int token = 0; token < block.count; ++token) {
    Vector products[kQueries];
    for (auto& product : products) product = Vector::zeros();
    for (int64_t i = 0; i < elements; i += kLanes) {
      const auto key = Vector::template decode<T>(block.keys[token] + i);
#pragma GCC unroll 8
      for (int query = 0; query < kQueries; ++query) {
        products[query].add_product(Vector::load(state.queries[query] + i), key);
      }
    }
    for (int query = 0; query < kQueries; ++query) state.weights[query][token] = products[query].sum();
  }
}

// Replaces the scores of a block by weights, relative to the largest score so far.
template <int kQueries>
INLINE void weigh(State<kQueries>& state, int count, int64_t elements) {
  for (int query = 0; query < kQueries; ++query) {
    float* weights = state.weights[query];
    float maximum = state.maxima[query], total = 0.0f;
    for (int token = 0; token < count; ++token) maximum = std::max(maximum, weights[token]);
    if (maximum > state.maxima[query]) {
      const float factor = exp2_of(state.maxima[query] - maximum);
      state.maxima[query] = maximum;
      state.totals[query] *= factor;
      for (int64_t i = 0; i < elements; ++i) state.sums[query][i] *= factor;
    }
#pragma omp simd
    for (int token = 0; token < count; ++token) weights[token] = exp2_of(weights[token] - maximum);
    for (int token = 0; token < count; ++token) total += weights[token];
    state.totals[query] += total;
  }
}

// Adds the weighted values of kVectors vectors from element `first` on.
template <class T, int kLanes, int kVectors, int kQueries>
INLINE void add_columns(State<kQueries>& state, const Block<T>& block, int64_t first) {
  using Vector = Vector<kLanes>;
  Vector sums[kQueries][kVectors];
  for (int query = 0; query < kQueries; ++query) {
    for (int i = 0; i < kVectors; ++i) sums[query][i] = Vector::load(state.sums[query] + first + i * kLanes);
  }
  for (int token = 0; token < block.count; ++token) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const auto value = Vector::template decode<T>(block.values[token] + first + i * kLanes);
#pragma GCC unroll 8
      for (int query = 0; query < kQueries; ++query) sums[query][i].add_product(state.weights[query][token], value);
    }
  }
  for (int query = 0; query < kQueries; ++query) {
    for (int i = 0; i < kVectors; ++i) sums[query][i].store(state.sums[query] + first + i * kLanes);
  }
}

template <class T, int kLanes, int kQueries>
INLINE void add_values(State<kQueries>& state, const Block<T>& block, int64_t elements) {
  constexpr int kVectors = kMostQueries / kQueries;  // as many sums at a time as there are in `score`
  int64_t i = 0;
  for (; i + kLanes * kVectors <= elements; i += kLanes * kVectors) add_columns<T, kLanes, kVectors>(state, block, i);
  for (; i < elements; i += kLanes) add_columns<T, kLanes, 1>(state, block, i);
}

template <class T>
INLINE void write_token(const Attention& problem, int64_t batch, int64_t head) {
  const size_t bytes = problem.elements * sizeof(typename T::Storage);
  std::memcpy(row_of<T>(problem.key, batch, head, *problem.position), row_of<T>(problem.new_key, batch, head), bytes);
  std::memcpy(row_of<T>(problem.value, batch, head, *problem.position), row_of<T>(problem.new_value, batch, head),
              bytes);
}

// Computes the query heads `first` to `first + count`; further ones of the kQueries are zeros.
template <class T, int kLanes, int kQueries>
INLINE void run_queries(const Attention& problem, int64_t batch, int64_t key_head, int64_t first, int64_t count) {
  const int64_t elements = problem.elements;
  State<kQueries> state;
  const float scale = problem.scale * 1.44269504f;  // log2(e)
  for (int query = 0; query < kQueries; ++query) {
    state.maxima[query] = -std::numeric_limits<float>::infinity();
    if (query < count) {
      decode_all<T>(row_of<T>(problem.query, batch, first + query), elements, state.queries[query]);
      for (int64_t i = 0; i < elements; ++i) state.queries[query][i] *= scale;
    } else {
      std::fill_n(state.queries[query], elements, 0.0f);
    }
  }
  Block<T> block;
  for (int64_t token = 0; token < problem.tokens; token += kTokens) {
    collect(problem, batch, key_head, token, block);
    if (block.count == 0) continue;
    score<T, kLanes>(state, block, elements);
    weigh(state, block.count, elements);
    add_values<T, kLanes>(state, block, elements);
  }
  for (int64_t query = 0; query < count; ++query) {
    // Without tokens the sums are zeros.
    const float factor = 1.0f / (state.totals[query] == 0.0f ? 1.0f : state.totals[query]);
    for (int64_t i = 0; i < elements; ++i) state.sums[query][i] *= factor;
    encode_all<T>(state.sums[query], elements,
                  static_cast<typename T::Storage*>(problem.out) +
                      (batch * problem.query_heads + first + query) * elements);
  }
}

template <class T, int kLanes>
INLINE void run_groups(const Attention& problem, int64_t begin, int64_t end) {
  const int64_t queries = problem.query_heads / problem.key_heads, parts = parts_of(problem);
  for (int64_t group = begin; group < end; ++group) {
    const int64_t part = group % parts, head = group / parts % problem.key_heads;
    const int64_t batch = group / parts / problem.key_heads;
    if (part == 0 && problem.position != nullptr) write_token<T>(problem, batch, head);
    const int64_t first = head * queries + part * kMostQueries;
    const int64_t count = std::min<int64_t>(kMostQueries, queries - part * kMostQueries);
    if (count == 1) {
      run_queries<T, kLanes, 1>(problem, batch, head, first, count);
    } else if (count == 2) {
      run_queries<T, kLanes, 2>(problem, batch, head, first, count);
    } else if (count <= 4) {
      run_queries<T, kLanes, 4>(problem, batch, head, first, count);
    } else {
      run_queries<T, kLanes, 8>(problem, batch, head, first, count);
    }
  }
}

#if defined(__x86_64__)
template <class T>
__attribute__((target("avx2,fma,f16c"))) void run_avx2(const Attention& problem, int64_t begin, int64_t end) {
  run_groups<T, 8>(problem, begin, end);
}
#endif

template <class T>
void run(const Attention& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (has_avx2()) return run_avx2<ForAvx2<T>>(problem, begin, end);
#endif
  run_groups<T, 4>(problem, begin, end);
}

}  // namespace

int64_t attention_groups(const Attention& problem) {
  return problem.batch * problem.key_heads * parts_of(problem);
}

void attention(const Attention& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return run<Float32>(problem, begin, end);
    case Type::float16:
      return run<Float16>(problem, begin, end);
    case Type::bfloat16:
      return run<BFloat16>(problem, begin, end);
  }
}

}  // namespace decode_step
