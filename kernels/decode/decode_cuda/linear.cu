// Linear layers of at most eight rows of x, on CUDA.
//
// Beyond naive/decode.cu: each weight is read once for all rows of x, by tensor cores whose multiplicand of 16 rows is
// a tile of the weights and that of 8 columns is x; a thread has the next vectors in flight while it multiplies, and
// the first ones of constant weights while the previous kernel runs; several layers of one x and its norm, the gate of
// an MLP, bias and residual are one launch.
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
#include <type_traits>

#include "decode/problem.h"
#include "decode_cuda/linear_plans.cuh"
#include "decode_cuda/tensor_cores.cuh"
#include "kit/async_copy.cuh"
#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "kit/vectors.cuh"

namespace decode_step {
namespace {

using namespace kit;

constexpr int kTile = 16;  // rows of weights per block: of one layer, or eight of the gate and eight of the projection

// The layers of a call. Blocks are numbered over the tiles of all.
struct Layers : Linear {
  int first_block[kMostWeights]{};  // of each layer; that of an absent one is the number of blocks
  int64_t first_output[kMostWeights]{};
  bool constant_weights = false;
  int tiles = 0;
  bool prefetches = false;  // weights that are not constant
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

__device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

template <typename T>
__device__ __forceinline__ float bias_of(const Weight& weight, int64_t row) {
  return weight.bias == nullptr ? 0.0f : decode(static_cast<const T*>(weight.bias)[row]);
}

// Stores the results of a block from the sums of its tile, each by a thread; `sum(row, r)` is that of a row of the tile
// and row r of x, and with a norm `sum(kTile, r)` that of the squares of row r.
template <typename T, typename Sum>
__device__ __forceinline__ void finish(const Layers& layers, const Tile& tile, bool has_norm, const Sum& sum) {
  const bool gated = layers.activation != Activation::none;
  const int outputs = gated ? kTile / 2 : kTile, i = static_cast<int>(threadIdx.x);
  const int row = i & (outputs - 1), r = gated ? i / (kTile / 2) : i / kTile;
  if (r >= layers.rows || tile.low_row + row >= tile.low.rows) return;
  const int64_t at = r * layers.outputs + tile.output + row;
  const float scale = has_norm ? rsqrtf(sum(kTile, r) / static_cast<float>(layers.inputs) + layers.eps) : 1.0f;
  float value = sum(row, r) * scale + bias_of<T>(tile.low, tile.low_row + row);
  if (gated) {
    const float up = sum(row + outputs, r) * scale + bias_of<T>(tile.high, tile.low_row + row);
    value = activated(value, layers.activation) * up;
  } else if (layers.residual != nullptr) {
    value += decode(static_cast<const T*>(layers.residual)[at]);
  }
  static_cast<T*>(layers.out)[at] = encode<T>(value);
}

// --- tensor cores ----------------------------------------------------------------------------------------------------

// Loads a vector of weights: not kept in L1, which x needs. Not with .nc, which no grid wait orders, see load_word.
__device__ __forceinline__ uint4 load_weights([[maybe_unused]] const void* from) {
  uint4 word{};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from));
#endif
  return word;
}

// Floats per row of x: the sums of the tile's rows, with a norm the sum of squares, and padding, so that the warps'
// stores hit different banks.
constexpr int kSumStride = kTile + 4;
constexpr int kGap = 32;  // elements between rows of x in shared memory, for the same reason

// Lane 4 * g + t has vectors of rows g and g + 8 of the tile and of row g of x. The inputs of one vector of 8 are
// spread over two products of 16, in the same way for weights and x: the order in which inputs are added does not
// matter, and no vector has to be shuffled.
template <typename T, int kPlan, bool kNorm = false>
__global__ void __launch_bounds__(kPlans[kPlan].warps* kWarp, kPlans[kPlan].blocks_per_sm)
    tensor_core_kernel(const __grid_constant__ Layers layers) {
  constexpr int kWarps = kPlans[kPlan].warps, kVectors = kPlans[kPlan].vectors;
  constexpr int kStep = 4 * 8 * kVectors;  // inputs that a warp multiplies at a time
  constexpr int kAhead = kPlans[kPlan].ahead, kLoads = kAhead * kVectors;
  constexpr bool kClusters = kPlans[kPlan].clusters && !kNorm, kLoops = kPlans[kPlan].loops || kNorm;
  const int cluster = kClusters ? static_cast<int>(gridDim.y) : 1;  // blocks that share a tile
  constexpr int kNear = kWarps * kStep;         // from these inputs to the next ones that a thread has in flight
  const int stride = cluster * kAhead * kNear;  // to those that it reads after them
  trigger_next_grid();
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int g = lane / 4, t = lane % 4, rank = kClusters ? static_cast<int>(blockIdx.y) : 0;
  Tile tile(layers, static_cast<int>(blockIdx.x));
  const int first_step = (rank * kAhead * kWarps + warp) * kStep, first = first_step + t * 8;
  extern __shared__ VectorOf<__nv_bfloat16> weighted_x[];  // with a norm: x times the norm's weight
  const int64_t row_of_x = layers.inputs + (kNorm ? kGap : 0);
  const T *low, *high, *x;
  int left;  // inputs from here on
  const auto start = [&](const Tile& tile) {
    // Rows past the end read the last row.
    low = static_cast<const T*>(tile.low.data) + min(tile.low_row + g, tile.low.rows - 1) * tile.low.stride + first;
    high =
        static_cast<const T*>(tile.high.data) + min(tile.high_row + g, tile.high.rows - 1) * tile.high.stride + first;
    x = (kNorm ? reinterpret_cast<const T*>(weighted_x) : static_cast<const T*>(layers.x)) + g * row_of_x + first;
    left = static_cast<int>(layers.inputs) - first;
  };
  start(tile);
  const bool has_row = g < layers.rows;

  const auto offset = [&](int i) { return i / kVectors * kNear + i % kVectors * 32; };
  uint4 next_low[kLoads], next_high[kLoads];
  const auto load_next = [&] {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      next_low[i] = offset(i) < left ? load_weights(low + offset(i)) : uint4{};
      next_high[i] = offset(i) < left ? load_weights(high + offset(i)) : uint4{};
    }
  };
  if (!layers.constant_weights) {
    // The first weights come to L2 meanwhile, where later stores of the previous kernel change them.
    const int bytes = min(kAhead * kNear, left) * static_cast<int>(sizeof(T));
    if (layers.prefetches && threadIdx.x < kWarp && t == 0 && bytes > 0) {
      prefetch_to_l2(low, bytes);
      prefetch_to_l2(high, bytes);
    }
    grid_wait();
  }
  load_next();
  if (layers.constant_weights) grid_wait();
  __shared__ float parts[kWarps][kMostRows][kSumStride];
  if constexpr (kNorm) {
    for (int r = 0; r < layers.rows; ++r) {
      float square = 0.0f;
#pragma unroll 2
      for (int i = static_cast<int>(threadIdx.x) * 8; i < layers.inputs; i += kWarps * kWarp * 8) {
        const auto values = load<T, 8>(static_cast<const T*>(layers.x) + r * layers.inputs + i);
        const auto weights = load<T, 8>(static_cast<const T*>(layers.norm) + i);
        float products[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          square = fmaf(decode(values, j), decode(values, j), square);
          products[j] = decode(values, j) * (decode(weights, j) + layers.offset);
        }
        weighted_x[(r * row_of_x + i) / 8] = encode_all<T>(products);
      }
      square = sum_of_lanes(square);
      if (lane == 0) parts[warp][r][kTile] = square;
    }
    __syncthreads();
  }
  const auto sum_of_warps = [&](int row, int r) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += parts[i][r][row];
    return sum;
  };
  for (int next = static_cast<int>(blockIdx.x + gridDim.x);; next += static_cast<int>(gridDim.x)) {
    float sums[4]{};
    // All threads of a warp take part in its products.
    for (int k = first_step; k < layers.inputs; k += stride) {
      uint4 low_words[kLoads], high_words[kLoads], x_words[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        low_words[i] = next_low[i];
        high_words[i] = next_high[i];
      }
      const T* const own_x = x;
      const int own_left = left;
      low += stride;
      high += stride;
      x += stride;
      left -= stride;
      if (kLoops && k + stride >= layers.inputs && next < layers.tiles) start(Tile(layers, next));
      load_next();
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const auto* const word = reinterpret_cast<const uint4*>(own_x + offset(i));
        x_words[i] = !has_row || offset(i) >= own_left ? uint4{} : kNorm ? *word : load_word(word);
      }
      // Else ptxas waits for x before it loads more weights, where registers are few.
      if (kClusters && kVectors == 1) __syncwarp();
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
    finish<T>(layers, tile, kNorm, sum_of_warps);
    if (!kLoops || next >= layers.tiles) return;
    __syncthreads();  // the sums have been read
    tile = Tile(layers, next);
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ float sums_of_block[kMostRows][kTile];
  const int row = static_cast<int>(threadIdx.x) % kTile, r = static_cast<int>(threadIdx.x) / kTile;
  if (r < kMostRows) sums_of_block[r][row] = sum_of_warps(row, r);
  const auto blocks = cooperative_groups::this_cluster();
  blocks.sync();
  if (rank == 0) {
    float sum = 0.0f;
    for (int i = 0; i < cluster && r < kMostRows; ++i) sum += *blocks.map_shared_rank(&sums_of_block[r][row], i);
    if (r < kMostRows) parts[0][r][row] = sum;
    __syncthreads();
    finish<T>(layers, tile, kNorm, [&](int row, int r) { return parts[0][r][row]; });
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
      sums[r] = sum_of_lanes(sums[r]);
      if (lane == 0) totals[r][row] = sums[r];
    }
  }
  __syncthreads();
  finish<T>(layers, tile, false, [&](int row, int r) { return totals[r][row]; });
}

// --- launch ----------------------------------------------------------------------------------------------------------

// Whether the norm's weight and the rows of x and of all weights start at 16-byte boundaries.
bool has_aligned_rows(const Linear& problem, int64_t element_bytes) {
  const auto fits = [&](const void* data, int64_t stride) {
    return aligned(data) && stride * element_bytes % kVectorBytes == 0;
  };
  bool all = fits(problem.x, problem.inputs) && aligned(problem.norm);
  for (int i = 0; i < problem.count; ++i) all = all && fits(problem.weights[i].data, problem.weights[i].stride);
  return all;
}

template <typename T>
void launch(const Linear& problem, bool constant_weights, cudaStream_t stream) {
  const bool gated = problem.activation != Activation::none;
  Layers layers{problem};
  layers.constant_weights = constant_weights;
  int64_t blocks = 0, outputs = 0;
  for (int i = 0; i < kMostWeights; ++i) {
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
      const bool has_norm = problem.norm != nullptr;
      const Choice choice =
          has_norm ? Choice{choose_for_norm(blocks, device.sms, problem.inputs), 1}
                   : choose(blocks, device.sms, problem.inputs, constant_weights, compiled_capability() >= 90);
      void (*const kernels[])(Layers) = {tensor_core_kernel<T, 0>, tensor_core_kernel<T, 1>, tensor_core_kernel<T, 2>,
                                         tensor_core_kernel<T, 3>, tensor_core_kernel<T, 4>, tensor_core_kernel<T, 5>,
                                         tensor_core_kernel<T, 6>, tensor_core_kernel<T, 7>};
      auto kernel = kernels[choice.plan % std::size(kernels)];
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        constexpr auto kTwo = tensor_core_kernel<T, 2, true>, kFive = tensor_core_kernel<T, 5, true>;
        if (has_norm) kernel = choice.plan == 2 ? kTwo : choice.plan == 5 ? kFive : tensor_core_kernel<T, 8, true>;
      }
      layers.tiles = static_cast<int>(blocks);
      const Plan& plan = kPlans[choice.plan];
      const bool loops = plan.loops || has_norm;
      const auto at_once = static_cast<unsigned>(device.sms * plan.blocks_per_sm);
      // Else too few blocks start before the previous kernel ends, and take up to 10 % longer (H200).
      layers.prefetches = loops || 2 * choice.cluster * blocks <= at_once;
      const size_t shared = has_norm ? problem.rows * (problem.inputs + kGap) * sizeof(T) : 0;
      launch_clusters_with_pdl(kernel, dim3(loops ? std::min(grid, at_once) : grid, choice.cluster),
                               dim3(1, choice.cluster), plan.warps * kWarp, shared, stream, layers);
      return;
    }
  }
  if (vectors) {
    launch_with_pdl(plain_kernel<T, kVectorWidth<T>>, grid, kPlainThreads, 0, stream, layers);
  } else {
    launch_with_pdl(plain_kernel<T, 1>, grid, kPlainThreads, 0, stream, layers);
  }
}

}  // namespace

bool is_for_torch(const Linear& problem, bool constant_weights) {
  DeviceProperties device;
  if (compiled_capability() != 90 || current_device_properties(&device) != cudaSuccess) return false;
  if (problem.count > 1 || problem.activation != Activation::none || problem.residual != nullptr) return false;
  if (problem.type == Type::float32 || problem.outputs % 8 != 0) return false;
  const int64_t tiles = (problem.outputs + kTile - 1) / kTile, inputs = problem.inputs;
  const bool straddling = problem.weights[0].stride % 32 != 0;
  return std::any_of(std::begin(kTorchRegions), std::end(kTorchRegions), [&](const Region& region) {
    return problem.rows >= region.least_rows && (region.weights == any || !constant_weights) &&
           (straddling || !region.straddling) && inputs >= region.least_inputs && inputs <= region.most_inputs &&
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
