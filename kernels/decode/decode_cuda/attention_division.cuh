// How a call of attention is divided among blocks: a part of attention.cu.
//
// Reads:    attributes of the current device.
// Must not: depend on the contents of tensors, so that a CUDA graph holds for all.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>

#include "decode/problem.h"
#include "decode_cuda/torch_regions.cuh"
#include "kit/launch.cuh"

namespace decode_step {
namespace {

using namespace kit;

// Warps of a block: their registers hold the sums of a head's chunks.
template <int kChunks>
constexpr int kWarpsFor = kChunks > 2 ? 4 : 8;
constexpr int kTokens = 16;     // of a tile, which a warp reads at a time
constexpr int kChunk = 64;      // elements of a head that are added up at a time
constexpr int kMostHeads = 16;  // query heads per block

constexpr int kMostSplits = 128;
constexpr int kMostBlocksOfCluster = 8;
constexpr int kLeastTokens = 32;  // per split, if there is more than one

}  // namespace

// Chooses the division that takes the least time by a model, in tokens of 128 elements that a block reads meanwhile. It
// is fitted on an H200 to 280 calls of 1 to 16 sequences, 1 to 32 key heads and 64 to 131,072 tokens, which take 1.01
// times the time of the fastest measured division in the mean.
int divide(Attention& problem, int64_t* floats) {
  if (problem.type == Type::float32 || compiled_capability() < 80) return cudaErrorNotSupported;
  Division& division = problem.division;
  const auto per_key_head = static_cast<int>(problem.query_heads / problem.key_heads);
  const auto elements = static_cast<int>(problem.elements), tokens = static_cast<int>(problem.tokens);
  DeviceProperties device;
  if (const cudaError_t error = current_device_properties(&device); error != cudaSuccess) return error;
  const int blocks_per_sm = elements <= kChunk ? 2 : 1, width = std::max(elements, kChunk);
  const int tokens_at_once = kTokens * (elements > 2 * kChunk ? 4 : 8);  // of a block
  const int slots = device.sms * blocks_per_sm, most = std::min(kMostSplits, tokens / kLeastTokens);
  const int clusters = compiled_capability() >= 90 ? kMostBlocksOfCluster : 0;
  int least = INT_MAX;
  // Blocks of fewer heads start and end faster, and read keys and values again, from L2.
  for (const int most_heads : {kMostHeads, kMostHeads / 2}) {
    if (most_heads < kMostHeads && per_key_head <= most_heads) break;
    const int heads = std::min(per_key_head, most_heads), head_blocks = (per_key_head + heads - 1) / heads;
    const auto blocks = static_cast<int>(problem.batch * problem.key_heads * head_blocks);
    const auto consider = [&](int splits, bool is_cluster) {
      // The percentage of the blocks that fit which run at once: clusters need adjacent SMs.
      const int percent = !is_cluster || (splits == 2 && blocks_per_sm == 1) ? 100
                          : blocks_per_sm == 2                               ? 86
                          : splits > 4 && splits < 8                         ? 76
                                                                             : 85;
      const int at_once = std::max(1, slots * percent / 100), step = tokens_at_once * splits;
      const int rounds = (blocks * splits + at_once - 1) / at_once;
      const int read = tokens <= step ? (tokens + splits - 1) / splits : (tokens + step - 1) / step * tokens_at_once;
      const int delivered = is_too_much(problem, heads, splits, blocks * splits, slots) ? 80 : 96;  // of 100 tokens
      const auto least_read = static_cast<int>(100 * problem.tokens * blocks / (delivered * slots));
      const int adding_up = splits == 1 ? 0
                            : is_cluster
                                ? rounds * 150 * 128 / width
                                : 280 * 128 / width + splits +
                                      4 * static_cast<int>(problem.batch * problem.query_heads) * splits / device.sms;
      const int starting = (heads > kMostHeads / 2 ? 240 : 220) * 128 / width;
      const int time = std::max(rounds * read, least_read / head_blocks) + rounds * starting + adding_up;
      if (time >= least) return;
      least = time;
      division = {heads, head_blocks, splits, is_cluster, false};
    };
    for (int splits = 1; splits <= std::clamp(most, 1, 16); ++splits) {
      if (splits > 1 && splits <= clusters) consider(splits, true);
      consider(splits, false);
    }
    // More splits pay only where all blocks run at once: the most, or fewer that read no more tokens each.
    for (const int share : {84, 97}) {
      const int fitting = std::min(most, slots * share / 100 / blocks);
      if (fitting <= 16) continue;
      const int step = tokens_at_once * fitting, reads = (tokens + step - 1) / step;
      consider(fitting, false);
      consider((tokens + tokens_at_once * reads - 1) / (tokens_at_once * reads), false);
    }
  }
  division.is_for_torch = is_for_torch(problem, slots);
  const int64_t parts = division.splits == 1 || division.is_cluster ? 0 : division.splits;
  *floats = parts * problem.batch * problem.query_heads * (problem.elements + 4);
  return cudaSuccess;
}

}  // namespace decode_step
