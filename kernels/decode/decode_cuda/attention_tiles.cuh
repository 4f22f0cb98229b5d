// A warp's tiles of keys and values, and the queries that they are multiplied with: parts of attention.cu.
//
// Reads:    keys, values, queries, and the mask.
// Writes:   the new key and value to the cache.
// Must not: add in an order that varies.
#pragma once

#include <cfloat>
#include <cstdint>

#include "decode/problem.h"
#include "decode_cuda/attention_division.cuh"
#include "decode_cuda/tensor_cores.cuh"
#include "kit/async_copy.cuh"
#include "kit/elements.cuh"
#include "kit/vectors.cuh"

namespace decode_step {
namespace {

using namespace kit;

__device__ __forceinline__ const char* at(const Heads& heads, int64_t batch, int64_t head, int64_t token, int bytes) {
  return static_cast<const char*>(heads.data) +
         (batch * heads.batch_stride + head * heads.head_stride + token * heads.token_stride) * bytes;
}

// Scores are exponents of 2. The largest of no tokens is finite, so that its difference from another is a number.
constexpr float kLeastScore = -FLT_MAX;
__device__ __forceinline__ float power_of_2(float exponent) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(exponent));  // exp2f takes three instructions more, for subnormal results
  return exponent;
}

__device__ __forceinline__ float over_lanes_of_row(float value, bool maximum) {
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, value, offset);
    value = maximum ? fmaxf(value, other) : value + other;
  }
  return value;
}

// Normalizes and rotates one head per group of four lanes: lane t of four has the vectors of elements i * 32 + t * 8.
template <typename T, int kChunks>
__device__ __forceinline__ void rotate(uint4 (&vectors)[2 * kChunks], const Rotary& rotary, const void* weight,
                                       int64_t batch, int t) {
  using Eight = Vector<T, 8>;
  const auto load_eight = [](const void* from, int64_t element) {
    return load<T, 8>(static_cast<const T*>(from) + element);
  };
  Eight words[2 * kChunks];
#pragma unroll
  for (int i = 0; i < 2 * kChunks; ++i) memcpy(&words[i], &vectors[i], sizeof(uint4));
  if (weight != nullptr) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) squares = fmaf(decode(words[i], e), decode(words[i], e), squares);
    }
    const float factor = rsqrtf(over_lanes_of_row(squares, false) / (kChunks * kChunk) + rotary.eps);
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) {
      const Eight weights = load_eight(weight, i * 32 + t * 8);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float value = decode(words[i], e) * factor;
        if (rotary.rounded_before_weight) value = decode(encode<T>(value));
        words[i].elements[e] = encode<T>(value * (decode(weights, e) + rotary.offset));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int64_t entry = batch * rotary.batch_stride + i * 32 + t * 8;
    const Eight cosines = load_eight(rotary.cos, entry), sines = load_eight(rotary.sin, entry);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float a = decode(words[i], e), b = decode(words[i + kChunks], e);
      const float cosine = decode(cosines, e), sine = decode(sines, e);
      words[i].elements[e] = encode<T>(a * cosine - b * sine);
      words[i + kChunks].elements[e] = encode<T>(b * cosine + a * sine);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kChunks; ++i) memcpy(&vectors[i], &words[i], sizeof(uint4));
}

// The block's heads and split, and the place of a thread in its warp's tiles. Lane 4 * g + t reads the queries of heads
// g and g + 8, the keys g and g + 8 of a tile, and the values of its scores' tokens, in vectors of 8 elements. It has:
//
//             scores[i][2 * h + c]   values[j][e][2 * h + c], if kWide   values[j][e / 2][e % 2 * 2 + c], else
//   head      g + 8 * h              g + 8 * h                           2 * t + c
//   token     8 * i + 2 * t + c      all                                 all
//   element   all                    64 * j + 8 * (2 * t + c) + e        64 * j + 8 * g + e
template <typename T, int kChunks>
struct Tiles {
  static constexpr int kBytes = sizeof(T);
  static constexpr int kRowVectors = 8 * kChunks;             // of 16 bytes, in a row of a tile
  static constexpr int kTileVectors = kTokens * kRowVectors;  // of keys, or of values

  const Attention& problem;
  uint4* const ring;  // [stages][warps][keys and values][kTokens][kRowVectors]
  int warps, warp, lane, g, t;
  int64_t batch, key_head, first_head;
  int head_block, heads;  // heads: of the block
  int tokens, elements;

  __device__ __forceinline__ Tiles(const Attention& problem, uint4* ring) : problem(problem), ring(ring) {
    const Division& division = problem.division;
    warps = division.warps;
    warp = static_cast<int>(threadIdx.x) / kWarp;
    lane = static_cast<int>(threadIdx.x) % kWarp;
    g = lane / 4;
    t = lane % 4;
    batch = blockIdx.z;
    key_head = blockIdx.y / division.head_blocks;
    head_block = static_cast<int>(blockIdx.y) % division.head_blocks;
    const auto per_key_head = static_cast<int>(problem.query_heads / problem.key_heads);
    heads = min(division.heads, per_key_head - head_block * division.heads);
    first_head = key_head * per_key_head + head_block * division.heads;
    tokens = static_cast<int>(problem.tokens);
    elements = static_cast<int>(problem.elements);
  }

  // The last elements of a head in place of ones past the end: no load has a condition, so that all are in flight at
  // once.
  __device__ __forceinline__ const uint4* vector_at(const char* from, int element) const {
    return reinterpret_cast<const uint4*>(from + min(element, elements - 8) * kBytes);
  }

  // The vectors of row r of a tile are permuted, so that loads of a warp hit different banks.
  static __device__ __forceinline__ constexpr int key_permutation(int r) { return (r & 1) << 2 | (r >> 1 & 3); }
  static __device__ __forceinline__ constexpr int value_permutation(int r) { return (r >> 1 & 3) << 1; }
  __device__ __forceinline__ uint4* keys(int stage) const { return ring + (stage * warps + warp) * 2 * kTileVectors; }

  // The vectors that this lane multiplies: of the keys, i and j count rows and products; of the values, rows and
  // chunks. Their addresses are that of a stage plus constants.
  __device__ __forceinline__ uint4* key_vector(int stage, int i, int j) const {
    return keys(stage) + g * kRowVectors + ((j % 2 * 4 + t) ^ key_permutation(g)) + i * 8 * kRowVectors + j / 2 * 8;
  }
  __device__ __forceinline__ uint4* value_vector(int stage, int i, int j) const {
    return keys(stage) + 2 * t * kRowVectors + (g ^ value_permutation(2 * t)) + kTileVectors +
           (i / 2 * 8 + i % 2) * kRowVectors + j * 8;
  }
  // The token of which this lane has score i.
  __device__ __forceinline__ int token_of_score(int tile, int i) const { return tile + i / 2 * 8 + 2 * t + i % 2; }

  // Starts the copies of a tile. A copy of a warp reads whole rows and writes them next to each other: half a row at a
  // time takes 20 % longer. Past the end it reads the last token.
  __device__ __forceinline__ void copy(int tile, int stage) const {
    const int q = static_cast<unsigned>(lane) / kRowVectors, v = static_cast<unsigned>(lane) % kRowVectors;
    const auto start = [&](const Heads& of, uint4* rows, const auto& permutation) {
      const auto* const from = reinterpret_cast<const char*>(vector_at(at(of, batch, key_head, tile, kBytes), v * 8));
      const int64_t stride = of.token_stride * kBytes;
      const SharedAddress to = shared_address(rows);
      const int own = (lane ^ permutation(q)) * kVectorBytes;
#pragma unroll
      for (int r = 0; r < kTokens; r += kWarp / kRowVectors) {
        cp_async_or_zero(to + r * kRowVectors * kVectorBytes + (own ^ permutation(r) * kVectorBytes),
                         from + static_cast<unsigned>(min(r + q, tokens - 1 - tile)) * stride,
                         kChunks > 2 || v * 8 < elements);
      }
    };
    start(problem.key, keys(stage), key_permutation);
    start(problem.value, keys(stage) + kTileVectors, value_permutation);
  }

  // Prefetches a tile into L2: a key or a value per lane. Bulk prefetches of so few bytes take up to 1 % longer.
  __device__ __forceinline__ void prefetch(int tile) const {
    const int token = min(tile + lane % kTokens, tokens - 1);
    const char* const from = at(lane < kTokens ? problem.key : problem.value, batch, key_head, token, kBytes);
    for (int i = 0; i < elements * kBytes; i += 128)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i) : "memory");
  }

  // Bit i: the mask includes the token of score i.
  __device__ __forceinline__ uint32_t included(const bool* mask, int tile) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = token_of_score(tile, i);
      bits |= static_cast<uint32_t>(token < tokens && (mask == nullptr || mask[token])) << i;
    }
    return bits;
  }
};

// The queries of a lane's heads g and g + 8, normalized and rotated. Those of heads of more than 128 elements are in
// shared memory, since the registers hold the sums.
template <typename T, int kChunks, bool kWide>
struct Queries {
  static constexpr bool kIsShared = kChunks > 2;
  static constexpr int kHalves = kWide ? 2 : 1, kVectors = 2 * kChunks;
  static constexpr int kSharedVectors = kIsShared ? kHalves * kVectors * kWarp : 1;

  uint4 own[kIsShared ? 1 : kHalves][kVectors];
  const uint4* shared;

  // `shared` has kSharedVectors vectors. All threads of the block call this.
  __device__ __forceinline__ Queries(const Tiles<T, kChunks>& tiles, uint4* shared) : shared(shared + tiles.lane) {
    if constexpr (kIsShared) {
      if (tiles.warp < kHalves) {
        read(tiles, tiles.g + 8 * tiles.warp, own[0]);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) shared[(tiles.warp * kVectors + i) * kWarp + tiles.lane] = own[0][i];
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) read(tiles, tiles.g + 8 * h, own[h]);
    }
  }

  // Reads the vectors of a head; zeros past the end. Not a lambda, which clang would call.
  static __device__ __forceinline__ void read(const Tiles<T, kChunks>& tiles, int head, uint4 (&vectors)[kVectors]) {
    const Attention& problem = tiles.problem;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int element = i * 32 + tiles.t * 8;
      const char* const from =
          at(problem.query, tiles.batch, tiles.first_head + min(head, tiles.heads - 1), 0, sizeof(T));
      const uint4 word = load_word(tiles.vector_at(from, element));
      vectors[i] = head < tiles.heads && element < tiles.elements ? word : uint4{};
    }
    if (problem.rotary.cos == nullptr) return;
    rotate<T, kChunks>(vectors, problem.rotary, problem.rotary.query_weight, tiles.batch, tiles.t);
  }

  // Vector i of head g + 8 * h.
  __device__ __forceinline__ uint4 vector_at(int h, int i) const {
    if (h >= kHalves) return {};
    return kIsShared ? shared[(h * kVectors + i) * kWarp] : own[kIsShared ? 0 : h][i];
  }
};

// Writes the new key and value to the cache, and in place of the copies in the tile: these do not wait for the
// position.
template <typename T, int kChunks>
__device__ __forceinline__ void write_new_token(const Tiles<T, kChunks>& tiles, int64_t position, int tile, int stage) {
  const Attention& problem = tiles.problem;
  const int g = tiles.g, t = tiles.t, lane = tiles.lane;
  const char* const new_key = at(problem.new_key, tiles.batch, tiles.key_head, 0, sizeof(T));
  const char* const new_value = at(problem.new_value, tiles.batch, tiles.key_head, 0, sizeof(T));
  uint4 vectors[2 * kChunks];
#pragma unroll
  for (int j = 0; j < 2 * kChunks; ++j) vectors[j] = load_word(tiles.vector_at(new_key, j * 32 + t * 8));
  if (problem.rotary.cos != nullptr) {
    rotate<T, kChunks>(vectors, problem.rotary, problem.rotary.key_weight, tiles.batch, t);
  }
  const auto store = [&](const Heads& cache, int element, uint4 vector) {
    char* const to = const_cast<char*>(at(cache, tiles.batch, tiles.key_head, position, sizeof(T)));
    if (element < tiles.elements && tiles.head_block == 0) {
      store_word(reinterpret_cast<uint4*>(to + element * sizeof(T)), vector);
    }
  };
#pragma unroll
  for (int j = 0; j < 2 * kChunks; ++j) {
    if (g == j % 8) store(problem.key, j * 32 + t * 8, vectors[j]);
    if (position == tile + g) *tiles.key_vector(stage, 0, j) = vectors[j];
    if (position == tile + 8 + g) *tiles.key_vector(stage, 1, j) = vectors[j];
  }
  store(problem.value, lane * 8, load_word(tiles.vector_at(new_value, lane * 8)));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (position != tiles.token_of_score(tile, i)) continue;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      *tiles.value_vector(stage, i, j) = load_word(tiles.vector_at(new_value, j * kChunk + g * 8));
    }
  }
}

// Multiplies the queries with a tile's keys.
template <typename T, int kChunks, bool kWide>
__device__ __forceinline__ void multiply_keys(const Tiles<T, kChunks>& tiles, const Queries<T, kChunks, kWide>& queries,
                                              int stage, float (&scores)[2][4]) {
  float halves[2][4]{};  // a second sum of each score, since a product waits for the sum that it is added to
#pragma unroll
  for (int j = 0; j < 2 * kChunks; ++j) {
    const uint4 low = queries.vector_at(0, j), high = queries.vector_at(1, j);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 key = *tiles.key_vector(stage, i, j);
      multiply<T>(scores[i], low.x, high.x, low.y, high.y, key.x, key.y);
      multiply<T>(halves[i], low.z, high.z, low.w, high.w, key.z, key.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) scores[i / 4][i % 4] += halves[i / 4][i % 4];
}

}  // namespace
}  // namespace decode_step
