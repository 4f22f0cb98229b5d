// Attention of one token per sequence over a cache, on CUDA.
//
// Beyond naive/decode.cu: keys and values are read once for all query heads of a key head, which are the rows of tensor
// core products; the tokens of the cache are divided among blocks, whose sums a second kernel adds up; a warp
// multiplies one tile of the cache while the next is on its way to shared memory; tiles of a constant cache are read
// while the previous kernel runs; the token's own key and value are written to the cache on the way.
//
// Reads:    keys and values of the tokens that the mask includes, once, and some that it excludes.
// Writes:   `out`, `parts`, and `key` and `value` at the position of the new ones.
// Must not: allocate, synchronize, or use another stream than the one given; add in an order that varies.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "decode/problem.h"
#include "decode_cuda/decode.h"
#include "decode_cuda/tensor_cores.cuh"
#include "kit/async_copy.cuh"
#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "kit/vectors.cuh"

namespace decode_step {
namespace {

using namespace kit;

// Warps of a block: their registers hold the sums of a head's chunks.
template <int kChunks>
constexpr int kWarpsFor = kChunks > 2 ? 4 : 8;
constexpr int kTokens = 16;       // of a tile, which a warp reads at a time
constexpr int kChunk = 64;        // elements of a head that are added up at a time
constexpr int kMostHeads = 16;    // query heads per block
constexpr int kMostSplits = 32;   // one for each lane of a warp of `sum_kernel`
constexpr int kLeastTokens = 48;  // per split, if there is more than one

// How a call is divided among blocks.
struct Division {
  int heads;        // query heads per block, at most kMostHeads
  int head_blocks;  // blocks for the query heads of a key head
  int splits;       // of the tokens
};

// Divides the tokens where otherwise SMs would have no block. A block takes as long as the reading of 384 more tokens,
// and adding up the splits as that of 192 (H100): fitted to caches of 330 to 8,192 tokens and 4 to 256 blocks.
cudaError_t divide(const Attention& problem, Division* division) {
  const auto per_key_head = static_cast<int>(problem.query_heads / problem.key_heads);
  // The registers of a block hold the sums of 16 heads of 128 elements, or of 8 of 256.
  division->heads = std::min(per_key_head, problem.elements > 2 * kChunk ? kMostHeads / 2 : kMostHeads);
  division->head_blocks = (per_key_head + division->heads - 1) / division->heads;
  int sms = 0;
  if (const cudaError_t error = sm_count(&sms); error != cudaSuccess) return error;
  const int64_t blocks = problem.batch * problem.key_heads * division->head_blocks;
  int64_t least = INT64_MAX;
  for (int splits = 1; splits == 1 || (splits <= kMostSplits && splits * kLeastTokens <= problem.tokens); ++splits) {
    const int64_t rounds = (blocks * splits + sms - 1) / sms;
    const int64_t cost = rounds * (problem.tokens / splits + 384) + (splits > 1 ? 192 : 0);
    if (cost >= least) continue;
    least = cost;
    division->splits = splits;
  }
  return cudaSuccess;
}

__device__ __forceinline__ const char* at(const Heads& heads, int64_t batch, int64_t head, int64_t token, int bytes) {
  return static_cast<const char*>(heads.data) +
         (batch * heads.batch_stride + head * heads.head_stride + token * heads.token_stride) * bytes;
}

// The factor of a sum of weights relative to `largest` where the others are relative to `overall`. Scores are
// exponents of 2.
__device__ __forceinline__ float factor_of(float largest, float overall) {
  return largest == -INFINITY ? 0.0f : exp2f(largest - overall);
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

// From the sums of a head in shared memory to those of the next: padded, so that stores hit different banks.
template <int kChunks>
constexpr int kSumRow = kChunks * kChunk + 4;
constexpr size_t kStaticBytes = 2 * sizeof(float) * 8 * kMostHeads;  // of shared memory, at most

// Of the parts of a query head, one for each split: [splits][elements + 2], each the sums, the largest score and the
// weights relative to it.
__device__ __forceinline__ float* part_of(float* parts, int64_t head, int split, int splits, int elements) {
  return parts + (head * splits + split) * (elements + 2);
}

// The block's heads and split, and the place of a thread in its warp's tiles.
//
// Lane 4 * g + t has query heads g and g + 8, vectors of the keys g and g + 8 of a tile, vectors of the values of
// tokens 2 * t, 2 * t + 1, and of those eight later, and scores of the same tokens: products of a head with a tile's
// keys have the layout that the product with its values needs. Elements are permuted so that each vector is one load.
template <typename T, int kChunks>
struct Tiles {
  static constexpr int kBytes = sizeof(T), kWarps = kWarpsFor<kChunks>;
  static constexpr int kRowVectors = 8 * kChunks;             // of 16 bytes, in a row of a tile
  static constexpr int kTileVectors = kTokens * kRowVectors;  // of keys, or of values

  const Attention& problem;
  uint4* const ring;  // [stages][kWarps][keys and values][kTokens][kRowVectors]
  int warp, lane, g, t;
  int64_t batch, key_head, first_head;
  int head_block, heads;  // heads: of the block
  int tokens, elements;

  __device__ __forceinline__ Tiles(const Attention& problem, const Division& division, uint4* ring)
      : problem(problem), ring(ring) {
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

  // The last elements of a head, or the last token, in place of ones past the end: no load has a condition, so that all
  // are in flight at once.
  __device__ __forceinline__ const uint4* vector_at(const char* from, int element) const {
    return reinterpret_cast<const uint4*>(from + min(element, elements - 8) * kBytes);
  }
  __device__ __forceinline__ const char* row(const Heads& of, int token) const {
    return at(of, batch, key_head, min(token, tokens - 1), kBytes);
  }

  // A copy of a warp reads whole rows and writes them next to each other: half a row at a time takes 20 % longer. The
  // vectors of a row are permuted, so that loads of a warp hit different banks.
  __device__ __forceinline__ uint4* key_at(int stage, int r, int v) const {
    return ring + (stage * kWarps + warp) * 2 * kTileVectors + r * kRowVectors + (v ^ ((r & 1) << 2 | (r >> 1 & 3)));
  }
  __device__ __forceinline__ uint4* value_at(int stage, int r, int v) const {
    return ring + ((stage * kWarps + warp) * 2 + 1) * kTileVectors + r * kRowVectors + (v ^ (r >> 1 & 3) << 1);
  }

  // The vectors that this lane multiplies: of the keys, i and j count rows and products; of the values, rows and
  // chunks.
  __device__ __forceinline__ uint4* key_vector(int stage, int i, int j) const {
    return key_at(stage, i * 8 + g, j * 4 + t);
  }
  __device__ __forceinline__ uint4* value_vector(int stage, int i, int j) const {
    return value_at(stage, i / 2 * 8 + 2 * t + i % 2, j * 8 + g);
  }
  // The token of which this lane has score i.
  __device__ __forceinline__ int token_of_score(int tile, int i) const { return tile + i / 2 * 8 + 2 * t + i % 2; }

  // Starts the copies of a tile.
  __device__ __forceinline__ void copy(int tile, int stage) const {
#pragma unroll
    for (int c = 0; c < kTileVectors; c += kWarp) {
      const int r = (c + lane) / kRowVectors, v = (c + lane) % kRowVectors;
      cp_async(key_at(stage, r, v), vector_at(row(problem.key, tile + r), v * 8));
    }
#pragma unroll
    for (int c = 0; c < kTileVectors; c += kWarp) {
      const int r = (c + lane) / kRowVectors, v = (c + lane) % kRowVectors;
      cp_async(value_at(stage, r, v), vector_at(row(problem.value, tile + r), v * 8));
    }
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

// The queries of a lane's heads g and g + 8, normalized and rotated.
template <typename T, int kChunks, bool kWide>
struct Queries {
  uint4 low[2 * kChunks], high[kWide ? 2 * kChunks : 1]{};

  __device__ __forceinline__ explicit Queries(const Tiles<T, kChunks>& tiles) {
    const Attention& problem = tiles.problem;
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) {
      const int element = i * 32 + tiles.t * 8;
      const auto of_head = [&](int head) {
        const char* const from =
            at(problem.query, tiles.batch, tiles.first_head + min(head, tiles.heads - 1), 0, sizeof(T));
        const uint4 word = load_word(tiles.vector_at(from, element));
        return head < tiles.heads && element < tiles.elements ? word : uint4{};
      };
      low[i] = of_head(tiles.g);
      if (kWide) high[i] = of_head(tiles.g + 8);
    }
    if (problem.rotary.cos == nullptr) return;
    rotate<T, kChunks>(low, problem.rotary, problem.rotary.query_weight, tiles.batch, tiles.t);
    if constexpr (kWide) rotate<T, kChunks>(high, problem.rotary, problem.rotary.query_weight, tiles.batch, tiles.t);
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

// Multiplies the queries with a tile's keys. scores[i][2 * h + j]: head g + 8 * h, token 8 * i + 2 * t + j.
template <typename T, int kChunks, bool kWide>
__device__ __forceinline__ void multiply_keys(const Tiles<T, kChunks>& tiles, const Queries<T, kChunks, kWide>& queries,
                                              int stage, float (&scores)[2][4]) {
#pragma unroll
  for (int j = 0; j < 2 * kChunks; ++j) {
    const uint4 low = queries.low[j], high = kWide ? queries.high[j] : uint4{};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 key = *tiles.key_vector(stage, i, j);
      multiply<T>(scores[i], low.x, high.x, low.y, high.y, key.x, key.y);
      multiply<T>(scores[i], low.z, high.z, low.w, high.w, key.z, key.w);
    }
  }
}

// A thread's sums over the tokens of its warp, for heads g and g + 8: weighted values; the largest score; and weights
// relative to it.
template <typename T, int kChunks, bool kWide>
struct WarpSums {
  static constexpr int kHalves = kWide ? 2 : 1;

  float values[kChunks][8][4]{};
  float largest[2]{-INFINITY, -INFINITY}, weights[2]{};

  // Replaces the scores of a tile by its tokens' weights, and scales the sums if the largest score has grown.
  __device__ __forceinline__ void add_weights(uint32_t included, float scale, float (&scores)[2][4]) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float overall = largest[h];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[i / 2][2 * h + i % 2];
        score = (included >> i & 1) != 0 ? score * scale : -INFINITY;
        overall = fmaxf(overall, score);
      }
      overall = over_lanes_of_row(overall, true);
      const float factor = factor_of(largest[h], overall);
      largest[h] = overall;
      weights[h] *= factor;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[i / 2][2 * h + i % 2];
        score = factor_of(score, overall);
        weights[h] += score;
      }
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          values[j][i][2 * h] *= factor;
          values[j][i][2 * h + 1] *= factor;
        }
      }
    }
  }

  // Adds a tile's values, times the weights of their tokens.
  __device__ __forceinline__ void add_values(const Tiles<T, kChunks>& tiles, int stage, uint32_t included,
                                             const float (&weights)[2][4]) {
    const uint32_t low0 = pack<T>(weights[0][0], weights[0][1]), low1 = pack<T>(weights[1][0], weights[1][1]);
    const uint32_t high0 = kWide ? pack<T>(weights[0][2], weights[0][3]) : 0;
    const uint32_t high1 = kWide ? pack<T>(weights[1][2], weights[1][3]) : 0;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      uint4 rows[4];
      // A value that is excluded may be anything, also NaN, whose product with 0 is NaN.
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i] = (included >> i & 1) != 0 ? *tiles.value_vector(stage, i, j) : uint4{};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t a = word_at(rows[0], i), b = word_at(rows[1], i);
        const uint32_t c = word_at(rows[2], i), d = word_at(rows[3], i);
        multiply<T>(values[j][2 * i], low0, high0, low1, high1, __byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
        multiply<T>(values[j][2 * i + 1], low0, high0, low1, high1, __byte_perm(a, b, 0x7632),
                    __byte_perm(c, d, 0x7632));
      }
    }
  }

  // Puts the weighted values of the block's heads into shared memory, [kWarps][kRows][kSumRow].
  __device__ __forceinline__ void share_values(const Tiles<T, kChunks>& tiles, float* warp_sums) const {
    constexpr int kRows = kWide ? kMostHeads : kMostHeads / 2;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        if (tiles.g + 8 * h >= tiles.heads) continue;
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          float* const to = warp_sums + (tiles.warp * kRows + tiles.g + 8 * h) * kSumRow<kChunks> + j * kChunk +
                            (2 * tiles.t + column) * 8;
#pragma unroll
          for (int i = 0; i < 8; i += 4) {
            *reinterpret_cast<float4*>(to + i) =
                make_float4(values[j][i][2 * h + column], values[j][i + 1][2 * h + column],
                            values[j][i + 2][2 * h + column], values[j][i + 3][2 * h + column]);
          }
        }
      }
    }
  }
};

// Adds up the warps of the block, in the memory of the ring, and writes the result, or the split's part of it.
template <typename T, int kChunks, bool kWide>
__device__ __forceinline__ void write_sums(const Tiles<T, kChunks>& tiles, const WarpSums<T, kChunks, kWide>& sums,
                                           const Division& division) {
  constexpr int kWarps = kWarpsFor<kChunks>, kRows = kWide ? kMostHeads : kMostHeads / 2;
  __shared__ float warp_largest[kWarps][kMostHeads], warp_weights[kWarps][kMostHeads];
  const Attention& problem = tiles.problem;
  const int elements = tiles.elements, heads = tiles.heads;
  auto* const warp_sums = reinterpret_cast<float*>(tiles.ring);
#pragma unroll
  for (int h = 0; h < (kWide ? 2 : 1); ++h) {
    const float weight = over_lanes_of_row(sums.weights[h], false);
    if (tiles.t == 0) {
      warp_largest[tiles.warp][tiles.g + 8 * h] = sums.largest[h];
      warp_weights[tiles.warp][tiles.g + 8 * h] = weight;
    }
  }
  __syncthreads();  // no warp reads its tiles any more
  sums.share_values(tiles, warp_sums);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < heads * elements; i += kWarps * kWarp) {
    const int h = i / elements, element = i % elements;
    float overall = -INFINITY, weight = 0.0f, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) overall = fmaxf(overall, warp_largest[w][h]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float factor = factor_of(warp_largest[w][h], overall);
      weight = fmaf(factor, warp_weights[w][h], weight);
      sum = fmaf(factor, warp_sums[(w * kRows + h) * kSumRow<kChunks> + element], sum);
    }
    const int64_t head = tiles.batch * problem.query_heads + tiles.first_head + h;
    if (division.splits == 1) {
      static_cast<T*>(problem.out)[head * elements + element] = encode<T>(weight > 0.0f ? sum / weight : 0.0f);
      continue;
    }
    float* const part = part_of(problem.parts, head, static_cast<int>(blockIdx.x), division.splits, elements);
    part[element] = sum;
    if (element == 0) {
      part[elements] = overall;
      part[elements + 1] = weight;
    }
  }
}

// `stages` tiles of a warp fit in shared memory: 2 or 1.
template <typename T, int kChunks, bool kWide>
__global__ void __launch_bounds__(kWarpsFor<kChunks>* kWarp, kChunks == 1 ? 2 : 1)
    attention_kernel(const __grid_constant__ Attention problem, const __grid_constant__ Division division, int stages,
                     bool constant_cache) {
  extern __shared__ uint4 ring[];
  trigger_next_grid();
  const Tiles<T, kChunks> tiles(problem, division, ring);
  // Neighbouring tiles belong to different blocks, so that all have as much to do where a mask includes the first
  // tokens only. The first tile is copied without waiting for its mask.
  const int tokens = tiles.tokens, step = kWarpsFor<kChunks> * division.splits * kTokens;
  const int first_tile = (tiles.warp * division.splits + static_cast<int>(blockIdx.x)) * kTokens;
  if (!constant_cache) grid_wait();
  if (stages > 1) {
    if (first_tile < tokens) tiles.copy(first_tile, 0);
    cp_async_commit();
  }
  if (constant_cache) grid_wait();

  const int64_t position = problem.position == nullptr ? -1 : *problem.position;
  const bool* const mask = problem.mask == nullptr ? nullptr : problem.mask + tiles.batch * problem.mask_stride;
  const Queries<T, kChunks, kWide> queries(tiles);
  WarpSums<T, kChunks, kWide> sums;
  const float scale = problem.scale * 1.4426950408889634f;  // log2(e)
  uint32_t next_included = tiles.included(mask, first_tile);
  uint32_t copied_included = stages > 1 ? tiles.included(mask, first_tile + step) : next_included;  // of the next copy
  int stage = 0;
  for (int tile = first_tile; tile < tokens; tile += step) {
    const int copied = tile + (stages - 1) * step;
    __syncwarp();  // the tile before has been read
    if (copied < tokens && __any_sync(kAllLanes, copied_included != 0)) tiles.copy(copied, stages > 1 ? stage ^ 1 : 0);
    cp_async_commit();
    const uint32_t included = stages > 1 ? next_included : copied_included;
    const int here = stage;
    next_included = copied_included;
    copied_included = tiles.included(mask, copied + step);
    if (stages > 1) stage ^= 1;
    const bool has_position = position >= tile && position < tile + kTokens;
    if (!__any_sync(kAllLanes, included != 0) && !has_position) continue;
    if (stages > 1) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncwarp();
    if (has_position) write_new_token(tiles, position, tile, here);
    float scores[2][4]{};
    multiply_keys(tiles, queries, here, scores);
    sums.add_weights(included, scale, scores);
    sums.add_values(tiles, here, included, scores);
  }
  cp_async_wait<0>();
  write_sums(tiles, sums, division);
}

// Adds up the parts of a query head: a block for each. Lane i of a warp has the factor of split i.
constexpr int kSumThreads = 128;
template <typename T>
__global__ void __launch_bounds__(kSumThreads) sum_kernel(float* parts, int splits, int elements, T* out) {
  trigger_next_grid();
  const int64_t head = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  grid_wait();
  const float* const of_lane = part_of(parts, head, min(lane, splits - 1), splits, elements) + elements;
  const float largest = lane < splits ? of_lane[0] : -INFINITY, weights = lane < splits ? of_lane[1] : 0.0f;
  constexpr int kRounds = (kMostElements + kSumThreads - 1) / kSumThreads;
  float values[kRounds][kMostSplits];  // all are loaded before the first is used
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int element = round * kSumThreads + static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kMostSplits; ++i) {
      values[round][i] = i < splits && element < elements ? part_of(parts, head, i, splits, elements)[element] : 0.0f;
    }
  }
  float overall = largest;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    overall = fmaxf(overall, __shfl_xor_sync(kAllLanes, overall, offset));
  }
  const float factor = factor_of(largest, overall);
  float weight = factor * weights;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) weight += __shfl_xor_sync(kAllLanes, weight, offset);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int element = round * kSumThreads + static_cast<int>(threadIdx.x);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMostSplits; ++i) sum = fmaf(__shfl_sync(kAllLanes, factor, i), values[round][i], sum);
    if (element < elements) out[head * elements + element] = encode<T>(weight > 0.0f ? sum / weight : 0.0f);
  }
}

template <typename T, int kChunks, bool kWide>
void launch(const Attention& problem, const Division& division, bool constant_cache, cudaStream_t stream) {
  constexpr size_t kStage = sizeof(uint4) * kWarpsFor<kChunks> * 2 * kTokens * 8 * kChunks;
  constexpr size_t kSums =
      sizeof(float) * kWarpsFor<kChunks> * (kWide ? kMostHeads : kMostHeads / 2) * kSumRow<kChunks>;
  const auto kernel = attention_kernel<T, kChunks, kWide>;
  int device = 0, room = 0;
  // Errors are also left for cudaGetLastError.
  if (current_device(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    return;
  }
  const int stages = 2 * kStage + kStaticBytes <= static_cast<size_t>(room) ? 2 : 1;
  const size_t bytes = std::max(kSums, stages * kStage);
  if (cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(bytes)) != cudaSuccess) {
    return;
  }
  const dim3 grid(division.splits, static_cast<unsigned>(problem.key_heads * division.head_blocks),
                  static_cast<unsigned>(problem.batch));
  launch_with_pdl(kernel, grid, dim3(kWarpsFor<kChunks> * kWarp), bytes, stream, problem, division, stages,
                  constant_cache);
  if (division.splits == 1) return;
  launch_with_pdl(sum_kernel<T>, dim3(static_cast<unsigned>(problem.batch * problem.query_heads)), dim3(kSumThreads), 0,
                  stream, problem.parts, division.splits, static_cast<int>(problem.elements),
                  static_cast<T*>(problem.out));
}

template <typename T, bool kWide>
void launch_for_elements(const Attention& problem, const Division& division, bool constant_cache, cudaStream_t stream) {
  if (problem.elements <= kChunk) {
    launch<T, 1, kWide>(problem, division, constant_cache, stream);
  } else if (problem.elements <= 2 * kChunk) {
    launch<T, 2, kWide>(problem, division, constant_cache, stream);
  } else {
    launch<T, 4, false>(problem, division, constant_cache, stream);
  }
}

}  // namespace

int attention_parts(const Attention& problem, int64_t* floats) {
  *floats = 0;
  Division division{};
  if (const cudaError_t error = divide(problem, &division); error != cudaSuccess) return error;
  if (division.splits > 1) *floats = problem.batch * problem.query_heads * division.splits * (problem.elements + 2);
  return cudaSuccess;
}

int attention(const Attention& problem, bool constant_cache, void* stream) {
  if (problem.type == Type::float32 || compiled_capability() < 80) return cudaErrorNotSupported;
  Division division{};
  if (const cudaError_t error = divide(problem, &division); error != cudaSuccess) return error;
  const auto to = static_cast<cudaStream_t>(stream);
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    if constexpr (sizeof(T) == 2) {
      if (division.heads > 8) {
        launch_for_elements<T, true>(problem, division, constant_cache, to);
      } else {
        launch_for_elements<T, false>(problem, division, constant_cache, to);
      }
    }
  });
}

}  // namespace decode_step
