// Linear layers of at most eight rows of x, on CUDA.
//
// Beyond naive/decode.cu: each weight is read once for all rows of x, by tensor cores whose multiplicand of 16 rows is
// a tile of the weights and that of 8 columns is x; a thread has the next vectors in flight while it multiplies, and
// the first ones of constant weights while the previous kernel runs; several layers of one x, the gate of an MLP, bias
// and residual are one launch.
//
// Reads:    each weight once; x once per block.
// Writes:   `out`.
// Must not: allocate, synchronize, or use another stream than the one given; add in an order that varies.
// For clang, which has these intrinsics: the header declares clusters for nvcc alone otherwise.
#define _CG_CLUSTER_INTRINSICS_AVAILABLE
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "decode/problem.h"
#include "decode_cuda/activation.cuh"
#include "decode_cuda/tensor_cores.cuh"
#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "kit/vectors.cuh"

namespace decode_step {
namespace {

using namespace kit;

constexpr int kTile = 16;  // rows of weights per block: of one layer, or eight of the gate and eight of the projection

// The layers of a call. Blocks are numbered over the tiles of all.
struct Layers {
  Weight weights[kMostWeights];
  int first_block[kMostWeights];  // of each layer; that of an absent one is the number of blocks
  int64_t first_output[kMostWeights];
  int64_t inputs, outputs;
  int rows;  // of x
  const void* x;
  const void* residual;
  void* out;
  Activation activation;
  bool constant_weights;
  int cluster;  // blocks that share a tile
  int tiles;
};

// One of several weights. clang would choose between their addresses, and put them into local memory.
#if defined(__clang__)
using Chosen = Weight;
#else
using Chosen = const Weight&;
#endif

// The work of a block.
struct Tile {
  Weight low, high;           // the layers of the first and the last eight rows of the tile
  int64_t low_row, high_row;  // the first of each eight
  int64_t output;             // the column of `out` of the first row

  __device__ __forceinline__ Tile(const Layers& layers, int block) {
    const bool gated = layers.activation != Activation::none;
    int layer = 0;
    if (!gated) {
#pragma unroll
      for (int i = 1; i < kMostWeights; ++i) layer = block >= layers.first_block[i] ? i : layer;
    }
    // Without an index that is known at run time only, which would put the parameters into local memory.
    low = layer == 0 ? Chosen(layers.weights[0]) : layer == 1 ? Chosen(layers.weights[1]) : Chosen(layers.weights[2]);
    const int first = layer == 0 ? 0 : layer == 1 ? layers.first_block[1] : layers.first_block[2];
    const int64_t before = layer == 0 ? 0 : layer == 1 ? layers.first_output[1] : layers.first_output[2];
    low_row = static_cast<int64_t>(block - first) * (gated ? kTile / 2 : kTile);
    high = gated ? Chosen(layers.weights[1]) : Chosen(low);
    high_row = gated ? low_row : low_row + kTile / 2;
    output = before + low_row;
  }
};

template <typename T>
__device__ __forceinline__ float bias_of(const Weight& weight, int64_t row) {
  return weight.bias == nullptr ? 0.0f : decode(static_cast<const T*>(weight.bias)[row]);
}

// Stores the results of a block from the sums of its tile; `sum(row, r)` is that of a row of the tile and row r of x.
template <typename T, int kThreads, typename Sum>
__device__ __forceinline__ void finish(const Layers& layers, const Tile& tile, const Sum& sum) {
  const bool gated = layers.activation != Activation::none;
  const int outputs = gated ? kTile / 2 : kTile;
  for (int i = static_cast<int>(threadIdx.x); i < outputs * layers.rows; i += kThreads) {
    const int row = i & (outputs - 1), r = gated ? i / (kTile / 2) : i / kTile;
    if (tile.low_row + row >= tile.low.rows) continue;
    const int64_t at = r * layers.outputs + tile.output + row;
    float value = sum(row, r) + bias_of<T>(tile.low, tile.low_row + row);
    if (gated) {
      value = activated(value, layers.activation) * (sum(row + outputs, r) + bias_of<T>(tile.high, tile.low_row + row));
    } else if (layers.residual != nullptr) {
      value += decode(static_cast<const T*>(layers.residual)[at]);
    }
    static_cast<T*>(layers.out)[at] = encode<T>(value);
  }
}

// --- tensor cores ----------------------------------------------------------------------------------------------------

// Loads a vector of weights: not kept in L1, which x needs.
__device__ __forceinline__ uint4 load_weights([[maybe_unused]] const void* from) {
  uint4 word{};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from));
#endif
  return word;
}

constexpr int kSumStride = kTile + 4;  // so that the warps' stores hit different banks

// How a tile is read: each thread reads `vectors` vectors of each of its rows at a time, of which `ahead` times are in
// flight. So many blocks per SM have the registers. `cost`: of the time, in percent, see `choose`. `clusters`: whether
// the blocks of a cluster can share a tile. `loops`: whether blocks compute several tiles, and load the next one while
// they add up the one before.
struct Plan {
  int warps, vectors, ahead, blocks_per_sm, cost;
  bool clusters = false, loops = false;
};
constexpr Plan kPlans[] = {{16, 2, 2, 1, 1000},     {16, 1, 2, 2, 104}, {8, 1, 3, 3, 105, true},
                           {4, 2, 2, 5, 115, true}, {4, 1, 5, 4, 100},  {4, 1, 3, 5, 106, false, true}};
constexpr int kMostBlocksOfCluster = 8;

// Lane 4 * g + t has vectors of rows g and g + 8 of the tile and of row g of x. The inputs of one vector of 8 are
// spread over two products of 16, in the same way for weights and x: the order in which inputs are added does not
// matter, and no vector has to be shuffled.
template <typename T, int kPlan>
__global__ void __launch_bounds__(kPlans[kPlan].warps* kWarp, kPlans[kPlan].blocks_per_sm)
    tensor_core_kernel(const __grid_constant__ Layers layers) {
  constexpr int kWarps = kPlans[kPlan].warps, kThreads = kWarps * kWarp, kVectors = kPlans[kPlan].vectors;
  constexpr int kStep = 4 * 8 * kVectors;  // inputs that a warp multiplies at a time
  constexpr int kAhead = kPlans[kPlan].ahead, kLoads = kAhead * kVectors;
  constexpr bool kClusters = kPlans[kPlan].clusters, kLoops = kPlans[kPlan].loops;
  const int cluster = kClusters ? layers.cluster : 1;
  const int stride = cluster * kWarps * kStep;  // from these inputs to the next ones of the warp
  trigger_next_grid();
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int g = lane / 4, t = lane % 4, rank = static_cast<int>(blockIdx.x) % cluster;
  Tile tile(layers, static_cast<int>(blockIdx.x) / cluster);
  const int first_step = (rank * kWarps + warp) * kStep, first = first_step + t * 8;
  const T *low, *high, *x;
  int left;  // inputs from here on
  const auto start = [&](const Tile& tile) {
    // Rows past the end read the last row.
    low = static_cast<const T*>(tile.low.data) + min(tile.low_row + g, tile.low.rows - 1) * tile.low.stride + first;
    high =
        static_cast<const T*>(tile.high.data) + min(tile.high_row + g, tile.high.rows - 1) * tile.high.stride + first;
    x = static_cast<const T*>(layers.x) + g * layers.inputs + first;
    left = static_cast<int>(layers.inputs) - first;
  };
  start(tile);
  const bool has_row = g < layers.rows;

  const auto offset = [&](int i) { return i / kVectors * stride + i % kVectors * 32; };
  uint4 next_low[kLoads], next_high[kLoads];
  const auto load_next = [&] {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      next_low[i] = offset(i) < left ? load_weights(low + offset(i)) : uint4{};
      next_high[i] = offset(i) < left ? load_weights(high + offset(i)) : uint4{};
    }
  };
  if (!layers.constant_weights) grid_wait();
  load_next();
  if (layers.constant_weights) grid_wait();
  __shared__ float parts[kWarps][kMostRows][kSumStride];
  const auto sum_of_warps = [&](int row, int r) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += parts[i][r][row];
    return sum;
  };
  for (int next = static_cast<int>(blockIdx.x + gridDim.x);; next += static_cast<int>(gridDim.x)) {
    float sums[4]{};
    // All threads of a warp take part in its products.
    for (int k = first_step; k < layers.inputs; k += kAhead * stride) {
      uint4 low_words[kLoads], high_words[kLoads], x_words[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        low_words[i] = next_low[i];
        high_words[i] = next_high[i];
        x_words[i] = has_row && offset(i) < left ? load_word(reinterpret_cast<const uint4*>(x + offset(i))) : uint4{};
      }
      low += kAhead * stride;
      high += kAhead * stride;
      x += kAhead * stride;
      left -= kAhead * stride;
      if (kLoops && k + kAhead * stride >= layers.inputs && next < layers.tiles) start(Tile(layers, next));
      load_next();
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        multiply<T>(sums, low_words[i].x, high_words[i].x, low_words[i].y, high_words[i].y, x_words[i].x, x_words[i].y);
        multiply<T>(sums, low_words[i].z, high_words[i].z, low_words[i].w, high_words[i].w, x_words[i].z, x_words[i].w);
      }
    }
    parts[warp][2 * t][g] = sums[0];
    parts[warp][2 * t + 1][g] = sums[1];
    parts[warp][2 * t][g + 8] = sums[2];
    parts[warp][2 * t + 1][g + 8] = sums[3];
    __syncthreads();
    if (cluster != 1) break;
    finish<T, kThreads>(layers, tile, sum_of_warps);
    if (!kLoops || next >= layers.tiles) return;
    __syncthreads();  // the sums have been read
    tile = Tile(layers, next);
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ float sums_of_block[kMostRows][kTile];
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kMostRows * kTile)
    sums_of_block[thread / kTile][thread % kTile] = sum_of_warps(thread % kTile, thread / kTile);
  const auto blocks = cooperative_groups::this_cluster();
  blocks.sync();
  if (rank == 0) {
    finish<T, kThreads>(layers, tile, [&](int row, int r) {
      float sum = 0.0f;
      for (int i = 0; i < cluster; ++i) sum += *blocks.map_shared_rank(&sums_of_block[r][row], i);
      return sum;
    });
  }
  blocks.sync();  // the first block has read the memory of the others
#endif
}

// --- any dtype, size and alignment -----------------------------------------------------------------------------------

constexpr int kPlainWarps = 8, kPlainThreads = kPlainWarps * kWarp;

// A warp computes two rows of the tile, one after the other.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kPlainThreads) plain_kernel(const __grid_constant__ Layers layers) {
  trigger_next_grid();
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const Tile tile(layers, static_cast<int>(blockIdx.x));
  grid_wait();
  __shared__ float totals[kMostRows][kTile];
#pragma unroll 1
  for (int row = warp; row < kTile; row += kPlainWarps) {
    const bool is_low = row < kTile / 2;
    const Weight& weight = is_low ? tile.low : tile.high;
    const int64_t weight_row = is_low ? tile.low_row + row : tile.high_row + row - kTile / 2;
    float sums[kMostRows]{};
    if (weight_row < weight.rows) {
      const T* const weights = static_cast<const T*>(weight.data) + weight_row * weight.stride;
      for (int64_t k = lane * kWidth; k < layers.inputs; k += kWarp * kWidth) {
        const auto vector = load<T, kWidth>(weights + k);
#pragma unroll
        for (int r = 0; r < kMostRows; ++r) {
          if (r >= layers.rows) break;
          const auto x = load<T, kWidth>(static_cast<const T*>(layers.x) + r * layers.inputs + k);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) sums[r] = fmaf(decode(vector, i), decode(x, i), sums[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kMostRows; ++r) {
#pragma unroll
      for (int offset = kWarp / 2; offset > 0; offset /= 2) sums[r] += __shfl_xor_sync(kAllLanes, sums[r], offset);
      if (lane == 0) totals[r][row] = sums[r];
    }
  }
  __syncthreads();
  finish<T, kPlainThreads>(layers, tile, [&](int row, int r) { return totals[r][row]; });
}

// --- launch ----------------------------------------------------------------------------------------------------------

// Whether the rows of x and of all weights start at 16-byte boundaries.
bool has_aligned_rows(const Linear& problem, int64_t element_bytes) {
  const auto fits = [&](const void* data, int64_t stride) {
    return aligned(data) && stride * element_bytes % kVectorBytes == 0;
  };
  bool all = fits(problem.x, problem.inputs);
  for (int i = 0; i < problem.count; ++i) all = all && fits(problem.weights[i].data, problem.weights[i].stride);
  return all;
}

// The number of a plan, and blocks that share a tile.
struct Choice {
  int plan, cluster;
};

// Chooses for so many tiles: all blocks should run at once, and then with as many bytes in flight as possible. Measured
// on an H200 for 256 to 20,480 inputs and 256 to 152,064 outputs: the plan that is chosen takes 1.003 times the time of
// the fastest one in the mean of 577 layers, and at most 1.04 times that of cuBLAS.
Choice choose(int64_t tiles, int64_t sms, int64_t inputs, bool has_clusters, bool constant_weights) {
  // All blocks wait for the weights: fewer ones take 6 % less time in the mean of 101 layers (H200).
  if (!constant_weights && tiles > (inputs > 1024 ? 7 : 3) * sms && tiles <= 10 * sms && inputs <= 2048) return {5, 1};
  if (has_clusters && inputs >= 4608 && (inputs < 12288 ? 4 : 3) * tiles <= sms) return {2, kMostBlocksOfCluster};
  if (has_clusters && inputs >= 9216 && 2 * tiles > sms && 10 * tiles <= 7 * sms) return {2, 4};
  if (tiles <= sms) return {0, 1};
  if (has_clusters && inputs >= 4096 && 13 * tiles <= 15 * sms) return {3, 4};
  if (has_clusters && inputs >= 4096 && 2 * tiles <= 3 * sms) return {2, 2};
  if (inputs >= 640 && tiles <= 2 * sms) return {1, 1};
  if (has_clusters && inputs >= 4096 && 2 * tiles <= 5 * sms) return {3, 2};
  if (inputs >= 640 && tiles <= 3 * sms) return {2, 1};
  if (inputs >= 8192 && 2 * tiles <= 7 * sms) return {1, 1};
  // Some SMs are idle at the end, and some loads are past the last input. Sums of 16 warps take longer, which matters
  // less with more inputs.
  const auto waste = [](int64_t all, int64_t at_once) {
    return static_cast<float>((all + at_once - 1) / at_once * at_once - all) / static_cast<float>(all);
  };
  const auto time = [&](const Plan& plan) {
    const auto read = static_cast<float>(inputs);
    return plan.cost + (plan.warps == 16 ? 32000 / read - read / 1820 : 0.0f) +
           50 * std::min(1.0f, waste(tiles, plan.blocks_per_sm * sms)) +
           60 * std::min(1.0f, waste(inputs, plan.warps * 32 * plan.vectors * plan.ahead));
  };
  const auto first = [&](const Plan& a, const Plan& b) { return time(a) < time(b); };
  return {static_cast<int>(std::min_element(std::begin(kPlans), std::end(kPlans), first) - kPlans), 1};
}

template <typename T>
void launch(const Linear& problem, bool constant_weights, cudaStream_t stream) {
  const bool gated = problem.activation != Activation::none;
  Layers layers{};
  layers.inputs = problem.inputs;
  layers.outputs = problem.outputs;
  layers.rows = static_cast<int>(problem.rows);
  layers.x = problem.x;
  layers.residual = problem.residual;
  layers.out = problem.out;
  layers.activation = problem.activation;
  layers.constant_weights = constant_weights;
  int64_t blocks = 0, outputs = 0;
  for (int i = 0; i < kMostWeights; ++i) {
    layers.weights[i] = problem.weights[i];
    layers.first_block[i] = static_cast<int>(blocks);
    layers.first_output[i] = outputs;
    if (i >= problem.count || (gated && i > 0)) continue;
    const int tile = gated ? kTile / 2 : kTile;
    blocks += (problem.weights[i].rows + tile - 1) / tile;
    outputs += problem.weights[i].rows;
  }
  // The layer of a block is the last one that starts at or before it; an absent one starts after all.
  for (int i = gated ? 1 : problem.count; i < kMostWeights; ++i) layers.first_block[i] = static_cast<int>(blocks);

  const auto grid = static_cast<unsigned>(blocks);
  const bool vectors = has_aligned_rows(problem, sizeof(T));
  if constexpr (sizeof(T) == 2) {
    if (vectors && compiled_capability() >= 80) {
      DeviceProperties device;
      if (current_device_properties(&device) != cudaSuccess) return;  // the error is also left for cudaGetLastError
      void (*const kernels[])(Layers) = {tensor_core_kernel<T, 0>, tensor_core_kernel<T, 1>, tensor_core_kernel<T, 2>,
                                         tensor_core_kernel<T, 3>, tensor_core_kernel<T, 4>, tensor_core_kernel<T, 5>};
      const Choice choice = choose(blocks, device.sms, problem.inputs, compiled_capability() >= 90, constant_weights);
      layers.cluster = choice.cluster;
      layers.tiles = static_cast<int>(blocks);
      const Plan& plan = kPlans[choice.plan];
      const auto most = static_cast<unsigned>(device.sms * plan.blocks_per_sm);
      launch_clusters_with_pdl(kernels[choice.plan], plan.loops ? std::min(grid, most) : grid * choice.cluster,
                               choice.cluster, plan.warps * kWarp, 0, stream, layers);
      return;
    }
  }
  if (vectors) {
    launch_with_pdl(plain_kernel<T, kVectorWidth<T>>, grid, kPlainThreads, 0, stream, layers);
  } else {
    launch_with_pdl(plain_kernel<T, 1>, grid, kPlainThreads, 0, stream, layers);
  }
}

// Regions where cuBLAS takes less time (H200, up to 5 %, or 11 % where the kernel waits for the weights), since some
// SMs are idle at the end: by rows of x, inputs, and tiles of ten SMs.
struct Region {
  int least_rows;
  bool constant_weights;  // also then
  int64_t least_inputs, most_inputs, above_tiles, most_tiles;
};
constexpr Region kTorchRegions[] = {
    {8, true, 5120, 8448, 62, 71}, {4, false, 3584, 8448, 62, 71}, {1, false, 392, 4096, 50, 56}};

}  // namespace

bool is_for_torch(const Linear& problem, bool constant_weights) {
  DeviceProperties device;
  if (compiled_capability() != 90 || current_device_properties(&device) != cudaSuccess) return false;
  if (problem.count > 1 || problem.activation != Activation::none || problem.residual != nullptr) return false;
  if (problem.type == Type::float32) return false;
  const int64_t tiles = (problem.outputs + kTile - 1) / kTile, inputs = problem.inputs;
  return std::any_of(std::begin(kTorchRegions), std::end(kTorchRegions), [&](const Region& region) {
    return problem.rows >= region.least_rows && (region.constant_weights || !constant_weights) &&
           inputs >= region.least_inputs && inputs <= region.most_inputs &&
           10 * tiles > region.above_tiles * device.sms && 10 * tiles <= region.most_tiles * device.sms;
  });
}

int run(const Linear& problem, bool constant_weights, void* stream) {
  return dispatch_dtype(problem.type, [&](auto type) {
    using T = typename decltype(type)::Element;
    launch<T>(problem, constant_weights, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace decode_step
