// How a call of attention is divided among blocks: a part of attention.cu.
//
// Reads:    attributes of the current device.
// Must not: depend on the contents of tensors, so that a CUDA graph holds for all.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>

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

constexpr int64_t kLeastElements = 23'000'000;  // of keys, about 0.03 ms

// Whether Torch's operation, which is cuDNN's, takes less time: on an H200 with Torch 2.11 and cold caches up to 20 %
// less in 6 of 196 calls. It takes 0.03 ms on the host, longer than shorter calls take on the device.
bool is_for_torch(const Attention& problem, const Division& division, int sms) {
  if (compiled_capability() != 90 || problem.mask != nullptr || problem.position != nullptr) return false;
  const auto caches = static_cast<int>(problem.batch * problem.key_heads);
  if (caches * problem.tokens * problem.elements < kLeastElements) return false;
  const bool is_power_of_2 = (caches & (caches - 1)) == 0;
  if (problem.elements <= kChunk) return 3 * caches >= 4 * sms || (caches >= 16 && caches <= 64 && is_power_of_2);
  if (problem.elements > 2 * kChunk || division.splits > 1 || division.warps < kWarpsFor<2>) return false;
  // Undivided blocks that leave SMs idle, where dividing their tokens takes longer.
  const int filled = 100 * caches * division.head_blocks / sms;
  return filled > 105 ? filled <= 190 : problem.elements > 96 && filled > 70 && filled <= 92;
}

// Returns the division that takes the least time by a model, in tokens of 128 elements that a block reads meanwhile. It
// is fitted on an H200 to 425 calls of 1 to 16 sequences, 1 to 32 key heads and 64 to 131,072 tokens, which take 1.015
// times the time of the fastest measured division in the mean.
Division best_division(const Attention& problem, const DeviceProperties& device) {
  Division division{};
  const auto per_key_head = static_cast<int>(problem.query_heads / problem.key_heads);
  const auto elements = static_cast<int>(problem.elements), tokens = static_cast<int>(problem.tokens);
  const int width = std::max(elements, kChunk), most_warps = elements > 2 * kChunk ? kWarpsFor<4> : kWarpsFor<2>;
  const int most = std::min(kMostSplits, tokens / kLeastTokens);
  const int clusters = compiled_capability() >= 90 ? kMostBlocksOfCluster : 0;
  const bool is_masked = problem.mask != nullptr, is_narrow = elements > kChunk && elements < 2 * kChunk && !is_masked;
  const auto query_heads = static_cast<float>(problem.batch * problem.query_heads);
  float least = INFINITY;
  // Considers blocks of so many warps and query heads. Twice as many blocks of half of the warps fill the SMs better;
  // blocks of fewer heads start and end faster, and read keys and values again, from L2.
  const auto consider_blocks = [&](int warps, int most_heads) {
    const int heads = std::min(per_key_head, most_heads), head_blocks = (per_key_head + heads - 1) / heads;
    const auto blocks = static_cast<int>(problem.batch * problem.key_heads * head_blocks);
    const bool is_half = warps < most_warps;
    const bool is_wide = heads > kMostHeads / 2, is_always_in_step = is_wide && elements <= kChunk;
    const int blocks_per_sm = (elements <= kChunk ? 2 : 1) * (is_half ? 2 : 1);
    const int slots = device.sms * blocks_per_sm, tokens_at_once = kTokens * warps;
    const float all_tokens = static_cast<float>(problem.tokens) * blocks * (is_half ? 2 : 1) / (slots * head_blocks);
    const float of_size = elements > 2 * kChunk ? 0.82f : elements > kChunk ? 1.0f : is_wide ? 0.904f : 1.18f;
    int counts[20], number = 0;  // of splits
    for (int splits = 1; splits <= std::clamp(std::min(most, 6 * slots / blocks), 1, 16); ++splits)
      counts[number++] = splits;
    // More splits pay only where all blocks run at once: the most, or fewer that read no more tokens each.
    for (const int share : {84, 100}) {
      const int fitting = std::min(most, slots * share / 100 / blocks);
      if (fitting <= 16) continue;
      const int step = tokens_at_once * fitting, reads = (tokens + step - 1) / step;
      counts[number++] = fitting;
      counts[number++] = (tokens + tokens_at_once * reads - 1) / (tokens_at_once * reads);
    }
    for (int i = 0; i < 4 * number; ++i) {
      const int splits = counts[i / 4];
      const bool is_cluster = i % 2 == 0, in_step = i % 4 > 1;
      if (is_cluster && (splits == 1 || splits > clusters)) continue;
      if (is_always_in_step ? !in_step : in_step && (is_masked || tokens <= tokens_at_once * splits)) continue;
      const int all = blocks * splits, step = tokens_at_once * splits;
      // The percentage of the blocks that fit which run at once: clusters need adjacent SMs.
      const int percent = !is_cluster || (splits == 2 && blocks_per_sm == 1) ? 100
                          : blocks_per_sm > 1                                ? 90
                          : splits > 4 && splits < 8                         ? 82
                                                                             : 88;
      const int at_once = std::max(1, slots * percent / 100), rounds = (all + at_once - 1) / at_once;
      if (is_half && rounds > 1) continue;  // takes longer than blocks of all warps
      const int read = tokens <= step ? (tokens + splits - 1) / splits : (tokens + step - 1) / step * tokens_at_once;
      // All warps of an SM that read in step wait for each other, and ask for less at a time. Heads of 96 elements ask
      // for more than the memory delivers otherwise, which is less then.
      const bool is_too_much =
          is_narrow && !in_step && tokens >= (is_half ? 512 : 1024) * splits && 100 * all > 80 * slots;
      const float delivered = is_masked     ? 1.41f
                              : is_too_much ? 0.885f
                              : in_step     ? (is_narrow ? 0.935f : 1.36f)
                                            : (is_narrow ? 0.818f : 0.9f);
      const float filled = std::min(1.0f, static_cast<float>(all) / static_cast<float>(slots));
      const float of_step = !in_step ? 1.0f : is_narrow ? 1.023f : 0.946f;
      const float of_blocks = (is_half ? (is_narrow ? 1.78f : 2.2f) : 1.0f) * (0.952f + 0.048f * filled);
      const float reading = rounds * read * of_size * of_step * of_blocks;
      const float adding = 211 + splits * (1 + 3.08f * query_heads / device.sms) * width / 128;
      const float adding_up = splits == 1 ? 0.0f : is_cluster ? 22 + 4.8f * splits + 100 * rounds : adding;
      const int starting = 182 + (is_wide ? 117 : 0) + (in_step ? 58 : 0);
      const float time = std::max(reading, all_tokens / delivered) + (rounds * starting + adding_up) * 128 / width;
      if (time >= least) continue;
      least = time;
      division = {heads, head_blocks, splits, warps, is_cluster, in_step, false};
    }
  };
  for (int warps = most_warps; warps >= kWarpsFor<4>; warps /= 2) {
    for (const int heads : {kMostHeads, kMostHeads / 2}) {
      if (heads == kMostHeads || per_key_head > heads) consider_blocks(warps, heads);
    }
  }
  division.is_for_torch = is_for_torch(problem, division, device.sms);
  return division;
}

}  // namespace

int divide(Attention& problem, int64_t* floats) {
  if (problem.type == Type::float32 || compiled_capability() < 80) return cudaErrorNotSupported;
  DeviceProperties device;
  if (const cudaError_t error = current_device_properties(&device); error != cudaSuccess) return error;
  // The layers of a model have the same sizes. To choose a division takes more than 1 us.
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
