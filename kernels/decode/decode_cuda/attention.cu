// Attention of one token per sequence over a cache, on CUDA.
//
// Beyond naive/decode.cu: keys and values are read once for all query heads of a key head, which are the rows of tensor
// core products; the tokens of the cache are divided among the warps of several blocks, which form a cluster and add up
// their results in each other's shared memory; the token's own key and value are written to the cache on the way.
//
// Reads:    keys and values of the tokens that the mask includes, once, and some that it excludes.
// Writes:   `out`, and `key` and `value` at the position of the new ones.
// Must not: allocate, synchronize, or use another stream than the one given; add in an order that varies.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "decode/problem.h"
#include "decode_cuda/decode.h"
#include "decode_cuda/tensor_cores.cuh"
#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "kit/vectors.cuh"

namespace decode_step {
namespace {

using namespace kit;

// Warps of a block: their registers hold the sums of a head's chunks.
template <int kChunks>
constexpr int kWarpsFor = kChunks > 2 ? 4 : 8;
constexpr int kTokens = 16;       // of a warp at a time
constexpr int kChunk = 64;        // elements of a head that are added up at a time
constexpr int kMostHeads = 16;    // query heads per block
constexpr int kLeastTokens = 64;  // per block, if there is more than one for a key head
constexpr int kMostSplits = 8;    // a cluster that every device with clusters can launch

// How a call is divided among blocks.
struct Division {
  int heads;        // query heads per block, at most kMostHeads
  int head_blocks;  // blocks for the query heads of a key head
  int splits;       // of the tokens: the blocks of a cluster
  int64_t tokens;   // per split
};

// Divides the tokens where otherwise SMs would have no block: more blocks than SMs would run one after another.
cudaError_t divide(const Attention& problem, Division* division) {
  const auto per_key_head = static_cast<int>(problem.query_heads / problem.key_heads);
  // The registers of a block hold the sums of 16 heads of 128 elements, or of 8 of 256.
  division->heads = std::min(per_key_head, problem.elements > 2 * kChunk ? kMostHeads / 2 : kMostHeads);
  division->head_blocks = (per_key_head + division->heads - 1) / division->heads;
  int sms = 0;
  if (const cudaError_t error = sm_count(&sms); error != cudaSuccess) return error;
  const int64_t blocks = problem.batch * problem.key_heads * division->head_blocks;
  int& splits = division->splits = 1;
  while (compiled_capability() >= 90 && splits < kMostSplits && splits * kLeastTokens < problem.tokens &&
         2 * splits * blocks <= sms) {
    splits *= 2;
  }
  division->tokens = (problem.tokens + splits - 1) / splits;
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

// Clusters, from capability 9.0 on.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Loads a float at this block's shared address from the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float load_of_block([[maybe_unused]] const float* from, [[maybe_unused]] int rank) {
  float value = 0.0f;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const auto local = static_cast<uint32_t>(__cvta_generic_to_shared(from));
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
#endif
  return value;
}

// The softmax over the tokens of a warp, a block or a cluster, of each query head.
struct Softmax {
  float largest[kMostHeads];  // score
  float weights[kMostHeads];  // their sum
};

// Lane 4 * g + t has query heads g and g + 8, vectors of the keys g and g + 8 of a tile, vectors of the values of
// tokens 2 * t, 2 * t + 1, and of those eight later, and scores of the same tokens: products of a head with a tile's
// keys have the layout that the product with its values needs. Elements are permuted so that each vector is one load.
template <typename T, int kChunks, bool kWide>
__global__ void __launch_bounds__(kWarpsFor<kChunks>* kWarp)
    attention_kernel(const __grid_constant__ Attention problem, const __grid_constant__ Division division) {
  constexpr int kWarps = kWarpsFor<kChunks>, kThreads = kWarps * kWarp;
  trigger_next_grid();
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int g = lane / 4, t = lane % 4;
  const int64_t batch = blockIdx.z, key_head = blockIdx.y / division.head_blocks;
  const int head_block = static_cast<int>(blockIdx.y) % division.head_blocks;
  const auto per_key_head = static_cast<int>(problem.query_heads / problem.key_heads);
  const int heads = min(division.heads, per_key_head - head_block * division.heads);
  const int64_t first_head = key_head * per_key_head + head_block * division.heads;
  const int64_t first = blockIdx.x * division.tokens, last = min(first + division.tokens, problem.tokens);
  const int elements = static_cast<int>(problem.elements);
  constexpr int kBytes = sizeof(T);
  grid_wait();

  const int64_t position = problem.position == nullptr ? -1 : *problem.position;
  const bool* const mask = problem.mask == nullptr ? nullptr : problem.mask + batch * problem.mask_stride;
  const auto is_included = [&](int64_t token) { return token < last && (mask == nullptr || mask[token]); };
  // The last elements of a head, or the last token, in place of ones past the end: no load has a condition, so that all
  // are in flight at once.
  const auto vector = [&](const char* from, int element) {
    return load_word(reinterpret_cast<const uint4*>(from + min(element, elements - 8) * kBytes));
  };
  const auto row = [&](const Heads& of, int64_t token) {
    return at(of, batch, key_head, min(token, last - 1), kBytes);
  };

  const char *const new_key = at(problem.new_key, batch, key_head, 0, kBytes), *const new_value =
                                                                                   at(problem.new_value, batch,
                                                                                      key_head, 0, kBytes);
  uint4 query[2 * kChunks], high_query[kWide ? 2 * kChunks : 1]{};
#pragma unroll
  for (int i = 0; i < 2 * kChunks; ++i) {
    const int element = i * 32 + t * 8;
    const auto of_head = [&](int head) {
      const uint4 word = vector(at(problem.query, batch, first_head + min(head, heads - 1), 0, kBytes), element);
      return head < heads && element < elements ? word : uint4{};
    };
    query[i] = of_head(g);
    if (kWide) high_query[i] = of_head(g + 8);
  }
  float sums[kChunks][8][4]{};
  float largest[2]{-INFINITY, -INFINITY}, weights[2]{};
  const float scale = problem.scale * 1.4426950408889634f;  // log2(e)

  const int64_t first_tile = first + warp * kTokens;
  bool next_included[4];
  const auto load_included = [&](int64_t tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) next_included[i] = is_included(tile + i / 2 * 8 + 2 * t + i % 2);
  };
  load_included(first_tile);
  for (int64_t tile = first_tile; tile < last; tile += kWarps * kTokens) {
    bool included[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) included[i] = next_included[i];
    load_included(tile + kWarps * kTokens);
    // The first tile is loaded without waiting for its mask.
    const bool any = included[0] || included[1] || included[2] || included[3];
    if (tile != first_tile && !__any_sync(kAllLanes, any)) continue;
    uint4 keys[2][2 * kChunks], values[4][kChunks];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const char* const from = row(problem.key, tile + i * 8 + g);
#pragma unroll
      for (int j = 0; j < 2 * kChunks; ++j) keys[i][j] = vector(from, j * 32 + t * 8);
    }
    const auto load_values = [&] {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const char* const from = row(problem.value, tile + i / 2 * 8 + 2 * t + i % 2);
#pragma unroll
        for (int j = 0; j < kChunks; ++j) values[i][j] = vector(from, j * kChunk + g * 8);
      }
    };
    // The sums of more than two chunks leave no registers for keys and values at a time.
    if constexpr (kChunks <= 2) load_values();
    // What was read at the position of the new key and value is replaced: the loads do not wait for the position.
    const bool has_position = position >= tile && position < tile + kTokens;
    if (has_position) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (position != tile + i * 8 + g) continue;
#pragma unroll
        for (int j = 0; j < 2 * kChunks; ++j) keys[i][j] = vector(new_key, j * 32 + t * 8);
      }
    }

    float scores[2][4]{};
#pragma unroll
    for (int j = 0; j < 2 * kChunks; ++j) {
      const uint4 high = kWide ? high_query[j] : uint4{};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply<T>(scores[i], query[j].x, high.x, query[j].y, high.y, keys[i][j].x, keys[i][j].y);
        multiply<T>(scores[i], query[j].z, high.z, query[j].w, high.w, keys[i][j].z, keys[i][j].w);
      }
    }
    if constexpr (kChunks > 2) load_values();
    if (has_position) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (position != tile + i / 2 * 8 + 2 * t + i % 2) continue;
#pragma unroll
        for (int j = 0; j < kChunks; ++j) values[i][j] = vector(new_value, j * kChunk + g * 8);
      }
    }
    // scores[i][2 * h + j]: head g + 8 * h, token 8 * i + 2 * t + j.
    float exponents[2][4];
#pragma unroll
    for (int h = 0; h < (kWide ? 2 : 1); ++h) {
      float overall = largest[h];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[i / 2][2 * h + i % 2];
        score = included[i] ? score * scale : -INFINITY;
        overall = fmaxf(overall, score);
      }
      overall = over_lanes_of_row(overall, true);
      const float factor = factor_of(largest[h], overall);
      largest[h] = overall;
      weights[h] *= factor;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = factor_of(scores[i / 2][2 * h + i % 2], overall);
        exponents[i / 2][2 * h + i % 2] = weight;
        weights[h] += weight;
      }
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sums[j][i][2 * h] *= factor;
          sums[j][i][2 * h + 1] *= factor;
        }
      }
    }
    const uint32_t low0 = pack<T>(exponents[0][0], exponents[0][1]), low1 = pack<T>(exponents[1][0], exponents[1][1]);
    const uint32_t high0 = kWide ? pack<T>(exponents[0][2], exponents[0][3]) : 0;
    const uint32_t high1 = kWide ? pack<T>(exponents[1][2], exponents[1][3]) : 0;
    // A value that is excluded may be anything, also NaN, whose product with 0 is NaN.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) values[i][j] = included[i] ? values[i][j] : uint4{};
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t a = word_at(values[0][j], i), b = word_at(values[1][j], i);
        const uint32_t c = word_at(values[2][j], i), d = word_at(values[3][j], i);
        multiply<T>(sums[j][2 * i], low0, high0, low1, high1, __byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
        multiply<T>(sums[j][2 * i + 1], low0, high0, low1, high1, __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x7632));
      }
    }
  }

  if (position >= first && position < last && head_block == 0 && warp < 2 && lane * 8 < elements) {
    const Heads& cache = warp == 0 ? problem.key : problem.value;
    char* const to = const_cast<char*>(at(cache, batch, key_head, position, kBytes));
    store_word(reinterpret_cast<uint4*>(to) + lane, vector(warp == 0 ? new_key : new_value, lane * 8));
  }

  // Adds up the warps of the block, then the blocks of the cluster.
  constexpr int kRows = kWide ? 16 : 8;
  __shared__ float warp_sums[kWarps][kRows][kChunk];
  __shared__ Softmax warp_softmax[kWarps];
  __shared__ Softmax softmax;
  __shared__ float block_sums[kRows][kChunks * kChunk];
#pragma unroll
  for (int h = 0; h < (kWide ? 2 : 1); ++h) {
    const float weight = over_lanes_of_row(weights[h], false);
    if (t == 0) {
      warp_softmax[warp].largest[g + 8 * h] = largest[h];
      warp_softmax[warp].weights[g + 8 * h] = weight;
    }
  }
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    if (j > 0) __syncthreads();
#pragma unroll
    for (int h = 0; h < (kWide ? 2 : 1); ++h) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float* const to = &warp_sums[warp][g + 8 * h][(2 * t + column) * 8];
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          *reinterpret_cast<float4*>(to + i) =
              make_float4(sums[j][i][2 * h + column], sums[j][i + 1][2 * h + column], sums[j][i + 2][2 * h + column],
                          sums[j][i + 3][2 * h + column]);
        }
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < heads * kChunk; i += kThreads) {
      const int h = i / kChunk, element = i % kChunk;
      float overall = -INFINITY, weight = 0.0f, sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) overall = fmaxf(overall, warp_softmax[w].largest[h]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float factor = factor_of(warp_softmax[w].largest[h], overall);
        weight = fmaf(factor, warp_softmax[w].weights[h], weight);
        sum = fmaf(factor, warp_sums[w][h][element], sum);
      }
      block_sums[h][j * kChunk + element] = sum;
      if (element == 0 && j == 0) {
        softmax.largest[h] = overall;
        softmax.weights[h] = weight;
      }
    }
  }
  if (division.splits > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  // The blocks of a cluster divide the results.
  for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < heads * elements;
       i += division.splits * kThreads) {
    const int h = i / elements, element = i % elements;
    float weight = softmax.weights[h], sum = block_sums[h][element];
    if (division.splits > 1) {
      float overall = -INFINITY;
      weight = sum = 0.0f;
      for (int rank = 0; rank < division.splits; ++rank) {
        overall = fmaxf(overall, load_of_block(&softmax.largest[h], rank));
      }
      for (int rank = 0; rank < division.splits; ++rank) {
        const float factor = factor_of(load_of_block(&softmax.largest[h], rank), overall);
        weight = fmaf(factor, load_of_block(&softmax.weights[h], rank), weight);
        sum = fmaf(factor, load_of_block(&block_sums[h][element], rank), sum);
      }
    }
    static_cast<T*>(problem.out)[(batch * problem.query_heads + first_head + h) * elements + element] =
        encode<T>(weight > 0.0f ? sum / weight : 0.0f);
  }
  if (division.splits > 1) cluster_sync();  // no block leaves while another reads its shared memory
}

template <typename T, int kChunks, bool kWide>
void launch(const Attention& problem, const Division& division, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(division.splits), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(division.splits, static_cast<unsigned>(problem.key_heads * division.head_blocks),
                        static_cast<unsigned>(problem.batch));
  config.blockDim = kWarpsFor<kChunks> * kWarp;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = compiled_capability() >= 90 ? 2 : 0;  // older code has neither a grid wait nor clusters
  cudaLaunchKernelEx(&config, attention_kernel<T, kChunks, kWide>, problem, division);
}

template <typename T, bool kWide>
void launch_for_elements(const Attention& problem, const Division& division, cudaStream_t stream) {
  if (problem.elements <= 64) {
    launch<T, 1, kWide>(problem, division, stream);
  } else if (problem.elements <= 128) {
    launch<T, 2, kWide>(problem, division, stream);
  } else {
    launch<T, 4, false>(problem, division, stream);
  }
}

}  // namespace

int attention(const Attention& problem, void* stream) {
  if (problem.type == Type::float32 || compiled_capability() < 80) return cudaErrorNotSupported;
  Division division{};
  if (const cudaError_t error = divide(problem, &division); error != cudaSuccess) return error;
  const auto to = static_cast<cudaStream_t>(stream);
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    if constexpr (sizeof(T) == 2) {
      if (division.heads > 8) {
        launch_for_elements<T, true>(problem, division, to);
      } else {
        launch_for_elements<T, false>(problem, division, to);
      }
    }
  });
}

}  // namespace decode_step
