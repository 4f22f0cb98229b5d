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
#include "kit/cpu.h"

namespace decode_step {
namespace {

using namespace kit;

constexpr int kMostQueries = 8;  // of a group
constexpr int64_t kTokens = 64;  // of a block

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
    block.keys[block.count] =
        is_new ? row_of<T>(problem.new_key, batch, head) : row_of<T>(problem.key, batch, head, token);
    block.values[block.count] =
        is_new ? row_of<T>(problem.new_value, batch, head) : row_of<T>(problem.value, batch, head, token);
    ++block.count;
  }
}

// The state of a group.
template <int kQueries>
struct State {
  float queries[kQueries][kMostElements];    // times scale * log2(e)
  float sums[kQueries][kMostElements] = {};  // of the weighted values
  float weights[kQueries][kTokens];          // of the tokens of a block; scores before
  float maxima[kQueries], totals[kQueries] = {};
};

// Functions of vectors are compiled with the target in force where they are written, not where they are inlined.
namespace portable {
constexpr int kLanes = 4;
#include "decode_cpu/vector.h"
//
#include "decode_cpu/attention_groups.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
constexpr int kLanes = 8;
#include "decode_cpu/vector.h"
//
#include "decode_cpu/attention_groups.h"
}  // namespace avx2
#pragma GCC pop_options
#endif

template <class T>
void run(const Attention& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (has_avx2()) return avx2::run_groups<ForAvx2<T>>(problem, begin, end);
#endif
  portable::run_groups<T>(problem, begin, end);
}

}  // namespace

int64_t attention_groups(const Attention& problem) { return problem.batch * problem.key_heads * parts_of(problem); }

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
