// How a call of attention is divided among blocks: a part of attention.cu.
//
// Reads:    attributes of the current device.
// Must not: depend on the contents of tensors, so that a CUDA graph holds for all.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <iterator>

#include "decode/problem.h"
#include "kit/launch.cuh"

namespace decode_step {
namespace {

using namespace kit;

// The most warps of a block: their registers hold the sums of a head's chunks.
template <int kChunks>
constexpr int kWarpsFor = kChunks > 2 ? 4 : 8;
constexpr int kTokens = 16;     // of a tile, which a warp reads at a time
constexpr int kChunk = 64;      // elements of a head that are added up at a time
constexpr int kMostHeads = 16;  // query heads per block

// Whether blocks read in step in each division: with a condition, the registers of this code do not suffice.
template <int kChunks, bool kWide>
constexpr bool kIsAlwaysInStep = kChunks == 1 && kWide;

constexpr int kMostSplits = 128;
constexpr int kMostBlocksOfCluster = 8;
constexpr int kLeastTokens = 32;  // per split, if there is more than one

// Regions where Torch's operation, which is cuDNN's, takes less time: by query heads of a key head, elements of a head,
// key heads of all sequences in percent of the SMs, and millions of elements of all keys, since it takes 0.03 ms on the
// host. On an H200 with Torch 2.11 and cold caches, it takes 0.81 to 1.10 times the kernel's time, in the mean of 156
// calls 0.97.
struct Region {
  int least_group, above_elements, most_elements, above_percent, most_percent, least_millions;
};
constexpr Region kTorchRegions[] = {
    {1, 0, 64, 0, 15, 40},        {9, 0, 64, 0, 50, 20},      {1, 0, 64, 21, 25, 40},  {1, 0, 64, 40, 50, 64},
    {1, 0, 64, 117, INT_MAX, 20}, {1, 64, 96, 28, 38, 64},    {1, 64, 96, 80, 92, 20}, {1, 64, 128, 105, INT_MAX, 20},
    {1, 96, 128, 21, 34, 48},     {1, 96, 128, 38, 100, 110}, {1, 96, 128, 64, 95, 16}};

bool is_for_torch(const Attention& problem, int64_t sms) {
  if (compiled_capability() != 90 || problem.mask != nullptr || problem.position != nullptr) return false;
  const int64_t caches = problem.batch * problem.key_heads;
  return std::any_of(std::begin(kTorchRegions), std::end(kTorchRegions), [&](const Region& region) {
    return problem.query_heads >= region.least_group * problem.key_heads && problem.elements > region.above_elements &&
           problem.elements <= region.most_elements && 100 * caches > region.above_percent * sms &&
           100 * caches <= region.most_percent * sms &&
           caches * problem.tokens * problem.elements >= region.least_millions * int64_t{1'000'000};
  });
}

// Returns the division that takes the least time by a model, in tokens that a block of all warps reads of a head of 128
// elements meanwhile. On an H200, that takes 1.016 times the time of the fastest of 13 divisions in the mean of 980
// calls; of 537 others, 9 take over 2 % more time than Torch's fastest back end, which takes 1.33 times in the mean.
Division best_division(const Attention& problem, const DeviceProperties& device) {
  Division division{};
  const auto per_key_head = static_cast<int>(problem.query_heads / problem.key_heads);
  const auto elements = static_cast<int>(problem.elements), tokens = static_cast<int>(problem.tokens);
  const int most_warps = elements > 2 * kChunk ? kWarpsFor<4> : kWarpsFor<2>;
  const int most_splits = std::clamp(tokens / kLeastTokens, 1, kMostSplits);
  const bool is_masked = problem.mask != nullptr;
  const float width = static_cast<float>(std::max(elements, kChunk)) / 128;
  const float caches_per_sm = static_cast<float>(problem.batch * problem.key_heads) / device.sms;
  const bool is_narrow = elements > kChunk && elements < 2 * kChunk && !is_masked;
  float least = INFINITY;
  // Small blocks fill the SMs better; those of fewer heads start and end faster, and read keys and values from L2, too.
  for (int warps = most_warps; warps >= (elements > 2 * kChunk ? most_warps : 2); warps /= 2) {
    const int parts = most_warps / warps;
    for (const int heads : {std::min(per_key_head, kMostHeads), std::min(per_key_head, kMostHeads / 2)}) {
      const int head_blocks = (per_key_head + heads - 1) / heads;
      const auto blocks = static_cast<int>(problem.batch * problem.key_heads * head_blocks);
      const bool is_wide = heads > kMostHeads / 2;
      const int blocks_per_sm = (elements <= kChunk ? 2 : 1) * parts, slots = device.sms * blocks_per_sm;
      for (int splits = 1; splits <= most_splits; ++splits) {
        const int all = blocks * splits, rounds = (all + slots - 1) / slots, step = kTokens * warps * splits;
        if ((is_wide && parts > 2) || (rounds > 1 && (parts > 1 || splits > 16))) break;
        // Clusters need adjacent SMs, of which some are left over.
        const int eighths = splits == 2 ? 8 : splits > 4 && splits < 8 && blocks_per_sm == 1 ? 6 : 7;
        const bool is_cluster =
            compiled_capability() >= 90 && splits > 1 && splits <= kMostBlocksOfCluster && 8 * all <= eighths * slots;
        // The warps of a block read neighbouring tiles then, but wait for each other, which many tiles make up for.
        const bool in_step = (is_wide && elements <= kChunk) || (!is_masked && tokens > 12 * step);
        const int read = tokens <= step ? (tokens + splits - 1) / splits : (tokens + step - 1) / step * kTokens * warps;
        // Of heads of 96 elements, many small blocks get less of the memory, and few of them more than their share.
        const bool is_light = is_narrow && !is_wide && parts > 1;
        const float idle = 1.0f - std::min(1.0f, static_cast<float>(all) / slots);
        const float delivering = is_narrow ? tokens * caches_per_sm * (is_light && idle < 0.2f ? 1.14f : 1.0f) : 0.0f;
        const float reading = rounds * read * parts * (elements > 2 * kChunk ? 0.63f : 1.0f) *
                              (parts > 1 ? 0.98f : 1.0f) * (is_light ? 1.0f - 0.36f * idle : 1.0f);
        const float adding_up = splits == 1  ? 0.0f
                                : is_cluster ? 114 + 7.2f * splits
                                             : 237 + 3.9f * splits * per_key_head * caches_per_sm * width;
        const float time = std::max(reading, delivering) + (rounds * (is_wide ? 317.0f : 193.0f) + adding_up) / width;
        if (time >= least) continue;
        least = time;
        division = {heads, head_blocks, splits, warps, is_cluster, in_step, false};
      }
    }
  }
  division.is_for_torch = is_for_torch(problem, device.sms);
  return division;
}

}  // namespace

int divide(Attention& problem, int64_t* floats) {
  if (problem.type == Type::float32 || compiled_capability() < 80) return cudaErrorNotSupported;
  DeviceProperties device;
  if (const cudaError_t error = current_device_properties(&device); error != cudaSuccess) return error;
  // The layers of a model have the same sizes. To choose a division takes some us.
  const std::array<int64_t, 8> sizes{
      problem.batch,    problem.query_heads,     problem.key_heads,           problem.tokens,
      problem.elements, problem.mask != nullptr, problem.position != nullptr, device.number};
  static thread_local std::array<int64_t, 8> last_sizes{};
  static thread_local Division last{};
  if (sizes != last_sizes) last = best_division(problem, device);
  last_sizes = sizes;
  problem.division = last;
  const int64_t parts = last.splits == 1 || last.is_cluster ? 0 : last.splits;
  *floats = parts * problem.batch * problem.query_heads * (problem.elements + 4);
  return cudaSuccess;
}

}  // namespace decode_step
