// Attention of one token per sequence over a cache, on CUDA.
//
// Beyond naive/decode.cu: keys and values are read once for all query heads of a key head, which are the rows of tensor
// core products; the tokens of the cache are divided among blocks, whose sums a cluster of blocks adds up through its
// shared memory, or a second kernel; a warp multiplies one tile of the cache while the next is on its way to shared
// memory; tiles of a constant cache are read while the previous kernel runs; the token's own key and value are written
// to the cache on the way.
//
// Reads:    keys and values of the tokens that the mask includes, once, and some that it excludes.
// Writes:   `out`, `parts`, and `key` and `value` at the position of the new ones.
// Must not: allocate, synchronize, or use another stream than the one given; add in an order that varies.
// For clang, which has these intrinsics: the header declares clusters for nvcc alone otherwise.
#define _CG_CLUSTER_INTRINSICS_AVAILABLE
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "decode/problem.h"
#include "decode_cuda/attention_division.cuh"
#include "decode_cuda/attention_tiles.cuh"
#include "kit/launch.cuh"

namespace decode_step {
namespace {

using namespace kit;

// From the sums of a head in shared memory to those of the next: padded, so that stores hit different banks.
template <int kChunks>
constexpr int kSumRow = kChunks * kChunk + 4;
constexpr size_t kStaticBytes = 10 * 1024;                       // of shared memory, at most
constexpr size_t kStageBytes = sizeof(uint4) * 2 * kTokens * 8;  // of a warp's tile, for each chunk

// Of the parts of a query head, one for each split: [splits][elements + 4], each the sums, the largest score, the
// weights relative to it, and two more for alignment.
__device__ __forceinline__ float* part_of(float* parts, int64_t head, int split, int splits, int elements) {
  return parts + (head * splits + split) * (elements + 4);
}

// A thread's sums over the tokens of its warp: the largest scores of heads g and g + 8, weights relative to them, and
// weighted values, as the table above `Tiles` shows them.
template <typename T, int kChunks, bool kWide>
struct WarpSums {
  static constexpr int kHalves = kWide ? 2 : 1;

  float values[kChunks][4 * kHalves][4]{};
  float largest[2]{kLeastScore, kLeastScore}, weights[2]{};

  // Replaces the scores of a tile by its tokens' weights, and scales the sums if the largest score has grown. The steps
  // of both heads are next to each other, so that neither waits for the other.
  __device__ __forceinline__ void add_weights(int t, uint32_t included, float scale, float (&scores)[2][4]) {
    const auto score_at = [&](int h, int i) -> float& { return scores[i / 2][2 * h + i % 2]; };
    float overall[kHalves], factors[kHalves];
    bool has_grown = false;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      overall[h] = largest[h];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score_at(h, i) = (included >> i & 1) != 0 ? score_at(h, i) * scale : -INFINITY;
        overall[h] = fmaxf(overall[h], score_at(h, i));
      }
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      overall[h] = over_lanes_of_row(overall[h], true);
      factors[h] = power_of_2(largest[h] - overall[h]);
      has_grown = has_grown || factors[h] != 1.0f;
      largest[h] = overall[h];
      weights[h] *= factors[h];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score_at(h, i) = power_of_2(score_at(h, i) - overall[h]);
        weights[h] += score_at(h, i);
      }
    }
    if (!__any_sync(kAllLanes, has_grown)) return;
    float of_values[2]{factors[0], factors[kHalves - 1]};
    if constexpr (!kWide) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        of_values[column] = __shfl_sync(kAllLanes, factors[0], 4 * (2 * t + column));
      }
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int i = 0; i < 4 * kHalves; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) values[j][i][e] *= of_values[kWide ? e / 2 : e % 2];
      }
    }
  }

  // Adds a tile's values, times the weights of their tokens.
  __device__ __forceinline__ void add_values(const Tiles<T, kChunks>& tiles, int stage, uint32_t included,
                                             const float (&weights)[2][4]) {
    const bool all_included = __all_sync(kAllLanes, included == 15);
    const uint32_t low0 = pack<T>(weights[0][0], weights[0][1]), low1 = pack<T>(weights[1][0], weights[1][1]);
    const uint32_t high0 = kWide ? pack<T>(weights[0][2], weights[0][3]) : 0;
    const uint32_t high1 = kWide ? pack<T>(weights[1][2], weights[1][3]) : 0;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      uint4 rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rows[i] = *tiles.value_vector(stage, i, j);
        // A value that is excluded may be anything, also NaN, whose product with 0 is NaN.
        if (!all_included && (included >> i & 1) == 0) rows[i] = uint4{};
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t a = word_at(rows[0], i), b = word_at(rows[1], i);
        const uint32_t c = word_at(rows[2], i), d = word_at(rows[3], i);
        const uint32_t even0 = __byte_perm(a, b, 0x5410), even1 = __byte_perm(c, d, 0x5410);
        const uint32_t odd0 = __byte_perm(a, b, 0x7632), odd1 = __byte_perm(c, d, 0x7632);
        if constexpr (kWide) {
          multiply<T>(values[j][2 * i], low0, high0, low1, high1, even0, even1);
          multiply<T>(values[j][2 * i + 1], low0, high0, low1, high1, odd0, odd1);
        } else {
          multiply<T>(values[j][i], even0, odd0, even1, odd1, low0, low1);
        }
      }
    }
  }

  // Puts the weighted values of the block's heads into shared memory, [warps][kRows][kSumRow].
  __device__ __forceinline__ void share_values(const Tiles<T, kChunks>& tiles, float* warp_sums) const {
    constexpr int kRows = kWide ? kMostHeads : kMostHeads / 2;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const int head = kWide ? tiles.g + 8 * h : 2 * tiles.t + column;
          if (head >= tiles.heads) continue;
          const auto sum_at = [&](int i) {
            return kWide ? values[j][i][2 * h + column] : values[j][i / 2][i % 2 * 2 + column];
          };
          float* const to = warp_sums + (tiles.warp * kRows + head) * kSumRow<kChunks> + j * kChunk +
                            (kWide ? 2 * tiles.t + column : tiles.g) * 8;
#pragma unroll
          for (int i = 0; i < 8; i += 4) {
            *reinterpret_cast<float4*>(to + i) = make_float4(sum_at(i), sum_at(i + 1), sum_at(i + 2), sum_at(i + 3));
          }
        }
      }
    }
  }
};

// Sums of one head and four elements: each relative to its own largest score, in any order that is the same each time.
struct Sums {
  float largest, weight;
  Vector<float, 4> value;

  // Writes the quotients.
  template <typename T>
  __device__ __forceinline__ void store_result(T* to) const {
    const float factor = weight > 0.0f ? 1.0f / weight : 0.0f;
    const auto& [a, b, c, d] = value.elements;
    store(to, encode_all<T, 4>({a * factor, b * factor, c * factor, d * factor}));
  }
};

// Adds up `count` sums, of which `at(i)` returns one.
template <int kMost, typename At>
__device__ __forceinline__ Sums add_up(int count, const At& at) {
  Sums all[kMost], total{kLeastScore, 0.0f, {}};
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    all[i] = i < count ? at(i) : Sums{kLeastScore, 0.0f, {}};
    total.largest = fmaxf(total.largest, all[i].largest);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const float factor = power_of_2(all[i].largest - total.largest);
    total.weight = fmaf(factor, all[i].weight, total.weight);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      total.value.elements[e] = fmaf(factor, all[i].value.elements[e], total.value.elements[e]);
  }
  return total;
}

// Adds up the warps of the block, in the memory of the ring, and writes the result, or the split's part of it.
template <typename T, int kChunks, bool kWide>
__device__ __forceinline__ void write_sums(const Tiles<T, kChunks>& tiles, const WarpSums<T, kChunks, kWide>& sums) {
  constexpr int kWarps = kWarpsFor<kChunks>, kRows = kWide ? kMostHeads : kMostHeads / 2;
  __shared__ float warp_largest[kWarps][kMostHeads], warp_weights[kWarps][kMostHeads];
  __shared__ float block_largest[kMostHeads], block_weights[kMostHeads];
  const Attention& problem = tiles.problem;
  const Division& division = problem.division;
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
  const int64_t first_head = tiles.batch * problem.query_heads + tiles.first_head;
  auto* const out = static_cast<T*>(problem.out) + first_head * elements;
  const int quads = elements / 4;
  const auto quad_at = [](float* sums) { return reinterpret_cast<Vector<float, 4>*>(sums); };
  for (int i = static_cast<int>(threadIdx.x); i < heads * quads; i += tiles.warps * kWarp) {
    const int h = i / quads, element = i % quads * 4;
    const Sums total = add_up<kWarps>(tiles.warps, [&](int w) {
      return Sums{warp_largest[w][h], warp_weights[w][h],
                  *quad_at(warp_sums + (w * kRows + h) * kSumRow<kChunks> + element)};
    });
    if (division.splits == 1) {
      total.store_result(out + 4 * i);
      continue;
    }
    float* const part = part_of(problem.parts, first_head + h, static_cast<int>(blockIdx.x), division.splits, elements);
    // In place of the first warp's, which no other thread reads.
    *quad_at((division.is_cluster ? warp_sums + h * kSumRow<kChunks> : part) + element) = total.value;
    if (element != 0) continue;
    (division.is_cluster ? block_largest[h] : part[elements]) = total.largest;
    (division.is_cluster ? block_weights[h] : part[elements + 1]) = total.weight;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (!division.is_cluster) return;
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  const int threads = tiles.warps * kWarp * division.splits;
  for (int i = static_cast<int>(cluster.thread_rank()); i < heads * quads; i += threads) {
    const int h = i / quads, element = i % quads * 4;
    const Sums total = add_up<kMostBlocksOfCluster>(division.splits, [&](int rank) {
      return Sums{cluster.map_shared_rank(block_largest, rank)[h], cluster.map_shared_rank(block_weights, rank)[h],
                  *quad_at(cluster.map_shared_rank(warp_sums, rank) + h * kSumRow<kChunks> + element)};
    });
    total.store_result(out + 4 * i);
  }
  cluster.sync();  // the others have read the shared memory of this block
#endif
}

// Two tiles of a warp fit in shared memory, or one: `stages`. Where it is known, the code is 1 to 7 % faster.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1100)
constexpr bool kHasTwoStages = true;
#else
constexpr bool kHasTwoStages = false;
#endif
template <typename T, int kChunks, bool kWide>
__global__ void __launch_bounds__(kWarpsFor<kChunks>* kWarp, kChunks == 1 ? 2 : 1)
    attention_kernel(const __grid_constant__ Attention problem, int fitting, bool constant_cache) {
  const int stages = kHasTwoStages || kChunks == 1 ? 2 : fitting;
  extern __shared__ uint4 ring[];
  trigger_next_grid();
  const Tiles<T, kChunks> tiles(problem, ring);
  // Neighbouring tiles belong to different blocks, so that all have as much to do where a mask includes the first
  // tokens only, or to the warps of a block that read in step. The first tile is copied without waiting for its mask.
  const int tokens = tiles.tokens, splits = problem.division.splits, split = static_cast<int>(blockIdx.x);
  const bool in_step = kIsAlwaysInStep<kChunks, kWide> || problem.division.in_step;
  const int step = tiles.warps * splits * kTokens;
  const int first_tile = (in_step ? split * tiles.warps + tiles.warp : tiles.warp * splits + split) * kTokens;
  if (!constant_cache && first_tile < tokens) tiles.prefetch(first_tile);
  if (!constant_cache) grid_wait();
  if (stages > 1) {
    if (first_tile < tokens) tiles.copy(first_tile, 0);
    cp_async_commit();
  }
  if (constant_cache) grid_wait();

  const int64_t position = problem.position == nullptr ? -1 : *problem.position;
  const bool* const mask = problem.mask == nullptr ? nullptr : problem.mask + tiles.batch * problem.mask_stride;
  __shared__ uint4 shared_queries[Queries<T, kChunks, kWide>::kSharedVectors];
  const Queries<T, kChunks, kWide> queries(tiles, shared_queries);
  WarpSums<T, kChunks, kWide> sums;
  const float scale = problem.scale * 1.4426950408889634f;  // log2(e)
  uint32_t next_included = tiles.included(mask, first_tile);
  uint32_t copied_included = stages > 1 ? tiles.included(mask, first_tile + step) : next_included;  // of the next copy
  int stage = 0;
  for (int tile = first_tile; (in_step ? tile - tiles.warp * kTokens : tile) < tokens; tile += step) {
    const int copied = tile + (stages - 1) * step;
    in_step ? __syncthreads() : __syncwarp();  // the tile before has been read
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
    sums.add_weights(tiles.t, included, scale, scores);
    sums.add_values(tiles, here, included, scores);
  }
  cp_async_wait<0>();
  write_sums(tiles, sums);
}

// Adds up the parts of a query head: a block for each. Groups of threads take every so many splits.
constexpr int kSumThreads = 256, kMostGroups = 16, kLoads = 8;  // loads of a thread before the first use
template <typename T>
__global__ void __launch_bounds__(kSumThreads) sum_kernel(float* parts, int splits, int elements, void* out) {
  trigger_next_grid();
  __shared__ Sums group_sums[kSumThreads];
  const int thread = static_cast<int>(threadIdx.x), quads = elements / 4, group = thread / quads;
  const int groups = min(kMostGroups, kSumThreads / quads), element = thread % quads * 4;
  const int64_t head = blockIdx.x;
  grid_wait();
  Sums total{kLeastScore, 0.0f, {}};
  for (int first = group; group < groups && first < splits; first += kLoads * groups) {
    total = add_up<kLoads + 1>(kLoads + 1, [&](int i) {
      const int split = first + (i - 1) * groups;
      if (i == 0 || split >= splits) return i == 0 ? total : Sums{kLeastScore, 0.0f, {}};
      const float* const part = part_of(parts, head, split, splits, elements);
      const auto score = *reinterpret_cast<const float2*>(part + elements);
      return Sums{score.x, score.y, load<float, 4>(part + element)};
    });
  }
  group_sums[thread] = total;
  __syncthreads();
  if (group > 0) return;
  add_up<kMostGroups>(groups, [&](int i) {
    return group_sums[i * quads + thread];
  }).store_result(static_cast<T*>(out) + head * elements + element);
}

// `kernels`: of a dtype, for 1, 2 or 4 chunks, and more than 8 heads or not.
void launch(const Attention& problem, void (*const (&kernels)[3][2])(Attention, int, bool),
            void (*sum)(float*, int, int, void*), bool constant_cache, cudaStream_t stream) {
  const Division& division = problem.division;
  const bool is_wide = division.heads > kMostHeads / 2;
  const int size = problem.elements <= kChunk ? 0 : problem.elements <= 2 * kChunk ? 1 : 2;
  const size_t warps = division.warps, chunks = size_t{1} << size, stage_bytes = kStageBytes * warps * chunks;
  const size_t sums_bytes = sizeof(float) * warps * (is_wide ? kMostHeads : kMostHeads / 2) * (chunks * kChunk + 4);
  const auto kernel = kernels[size][is_wide];
  DeviceProperties device;
  if (current_device_properties(&device) != cudaSuccess) return;  // errors are also left for cudaGetLastError
  const int stages = 2 * stage_bytes + kStaticBytes <= static_cast<size_t>(device.max_shared_bytes_per_block) ? 2 : 1;
  const size_t bytes = std::max(sums_bytes, stages * stage_bytes);
  // The device's limit: another thread may be launching the kernel with more bytes than these.
  if (cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           device.max_shared_bytes_per_block - static_cast<int>(kStaticBytes)) != cudaSuccess) {
    return;
  }
  const dim3 grid(division.splits, static_cast<unsigned>(problem.key_heads * division.head_blocks),
                  static_cast<unsigned>(problem.batch));
  const dim3 cluster(division.is_cluster ? division.splits : 1);
  launch_clusters_with_pdl(kernel, grid, cluster, dim3(warps * kWarp), bytes, stream, problem, stages, constant_cache);
  if (division.splits == 1 || division.is_cluster) return;
  launch_with_pdl(sum, dim3(static_cast<unsigned>(problem.batch * problem.query_heads)), dim3(kSumThreads), 0, stream,
                  problem.parts, division.splits, static_cast<int>(problem.elements), problem.out);
}

}  // namespace

int run(const Attention& problem, bool constant_cache, void* stream) {
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    if constexpr (sizeof(T) == 2) {
      void (*const kernels[][2])(Attention, int, bool) = {
          {attention_kernel<T, 1, false>, attention_kernel<T, 1, true>},
          {attention_kernel<T, 2, false>, attention_kernel<T, 2, true>},
          {attention_kernel<T, 4, false>, attention_kernel<T, 4, true>}};
      launch(problem, kernels, sum_kernel<T>, constant_cache, static_cast<cudaStream_t>(stream));
    }
  });
}

}  // namespace decode_step
