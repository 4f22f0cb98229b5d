// Attention of one token per sequence on the CPU.
//
// Reads:    the keys and values of the tokens that the mask includes, once for all queries of a group.
// Writes:   `out` of the groups `begin` to `end`, and the new token in the cache.
// Must not: start threads, or keep state between calls.
//
// A group is of the query heads that read the same keys. Functions are compiled once per instruction set and dispatched
// at run time. Results may differ between instruction sets in the last bit.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "decode/problem.h"
#include "kit/cpu.h"

namespace decode_step {
namespace {

using namespace kit;

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

template <class T>
INLINE typename T::Storage* row_of(const Heads& heads, int64_t batch, int64_t head, int64_t token = 0) {
  return static_cast<typename T::Storage*>(heads.data) + batch * heads.batch_stride + head * heads.head_stride +
         token * heads.token_stride;
}

template <class T>
INLINE void write_token(const Attention& problem, int64_t batch, int64_t head) {
  const size_t bytes = problem.elements * sizeof(typename T::Storage);
  std::memcpy(row_of<T>(problem.key, batch, head, *problem.position), row_of<T>(problem.new_key, batch, head), bytes);
  std::memcpy(row_of<T>(problem.value, batch, head, *problem.position), row_of<T>(problem.new_value, batch, head),
              bytes);
}

// Replaces scores by weights, and returns their sum.
INLINE float weigh(float* scores, int64_t count) {
  float largest = -std::numeric_limits<float>::infinity(), total = 0.0f;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, scores[i]);
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = exp2_of(scores[i] - largest);
    total += scores[i];
  }
  return total;
}

template <class T>
INLINE void run_group(const Attention& problem, int64_t batch, int64_t head) {
  const int64_t elements = problem.elements, queries = problem.query_heads / problem.key_heads;
  if (problem.position != nullptr) write_token<T>(problem, batch, head);
  std::vector<int64_t> tokens;  // that the mask includes
  for (int64_t token = 0; token < problem.tokens; ++token) {
    if (problem.mask == nullptr || problem.mask[batch * problem.mask_stride + token]) tokens.push_back(token);
  }
  const auto count = static_cast<int64_t>(tokens.size());
  std::vector<float> vectors(queries * elements), sums(queries * elements), scores(queries * count);
  for (int64_t query = 0; query < queries; ++query) {
    decode_all<T>(row_of<T>(problem.query, batch, head * queries + query), elements, &vectors[query * elements]);
  }
  float row[kMostElements];
  for (int64_t i = 0; i < count; ++i) {
    decode_all<T>(row_of<T>(problem.key, batch, head, tokens[i]), elements, row);
    for (int64_t query = 0; query < queries; ++query) {
      const float* vector = &vectors[query * elements];
      float product = 0.0f;
#pragma omp simd reduction(+ : product)
      for (int64_t j = 0; j < elements; ++j) product += vector[j] * row[j];
      scores[query * count + i] = product * (problem.scale * 1.44269504f);  // log2(e)
    }
  }
  std::vector<float> totals(queries);
  for (int64_t query = 0; query < queries; ++query) totals[query] = weigh(scores.data() + query * count, count);
  for (int64_t i = 0; i < count; ++i) {
    decode_all<T>(row_of<T>(problem.value, batch, head, tokens[i]), elements, row);
    for (int64_t query = 0; query < queries; ++query) {
      float* sum = &sums[query * elements];
      const float weight = scores[query * count + i];
#pragma omp simd
      for (int64_t j = 0; j < elements; ++j) sum[j] += weight * row[j];
    }
  }
  auto* out =
      static_cast<typename T::Storage*>(problem.out) + (batch * problem.query_heads + head * queries) * elements;
  for (int64_t query = 0; query < queries; ++query) {
    float* sum = &sums[query * elements];
    for (int64_t j = 0; j < elements && count > 0; ++j) sum[j] /= totals[query];
    encode_all<T>(sum, elements, out + query * elements);
  }
}

}  // namespace

void run(const Attention& problem, int64_t begin, int64_t end) {
  run_on_cpu(problem.type, [&](auto type) ALWAYS_INLINE {
    for (int64_t group = begin; group < end; ++group) {
      run_group<decltype(type)>(problem, group / problem.key_heads, group % problem.key_heads);
    }
  });
}

}  // namespace decode_step
