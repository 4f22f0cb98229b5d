// How a call of attention is divided among blocks: a part of attention.cu.
//
// Reads:    attributes of the current device.
// Must not: depend on the contents of tensors, so that a CUDA graph holds for all.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>

#include "decode/problem.h"
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

// How a call is divided among blocks.
struct Division {
  int heads;        // query heads per block, at most kMostHeads
  int head_blocks;  // blocks for the query heads of a key head
  int splits;       // of the tokens
  bool is_cluster;  // of the blocks of all splits, which add up their sums; else `sum_kernel` does
  bool is_paced;    // blocks read slower, see `divide`
};

constexpr int kMostSplits = 128;
constexpr int kMostBlocksOfCluster = 8;
constexpr int kLeastTokens = 32;  // per split, if there is more than one

// Divides the tokens in the way that takes the least time by a model, in tokens of 128 elements that a block reads
// meanwhile. It is fitted on an H200 to 90 calls of 1 to 16 sequences, 1 to 32 key heads and 64 to 131,072 tokens,
// which take 1.01 times the time of the fastest measured division in the mean.
cudaError_t divide(const Attention& problem, Division* division) {
  const auto per_key_head = static_cast<int>(problem.query_heads / problem.key_heads);
  const auto elements = static_cast<int>(problem.elements), tokens = static_cast<int>(problem.tokens);
  // The registers of a block hold the sums of 16 heads of 128 elements, or of 8 of 256.
  division->heads = std::min(per_key_head, elements > 2 * kChunk ? kMostHeads / 2 : kMostHeads);
  division->head_blocks = (per_key_head + division->heads - 1) / division->heads;
  DeviceProperties device;
  if (const cudaError_t error = current_device_properties(&device); error != cudaSuccess) return error;
  const auto blocks = static_cast<int>(problem.batch * problem.key_heads * division->head_blocks);
  const int blocks_per_sm = elements <= kChunk ? 2 : 1, width = std::max(elements, kChunk);
  const int tokens_at_once = kTokens * (elements > 2 * kChunk ? 4 : 8);  // of a block
  const int slots = device.sms * blocks_per_sm;
  // The percentage of the blocks that fit which run at once: clusters need adjacent SMs.
  const auto percent = [&](int splits, bool is_cluster) {
    if (!is_cluster || (splits == 2 && blocks_per_sm == 1)) return 100;
    return blocks_per_sm == 2 ? 86 : splits > 4 && splits < 8 ? 76 : 85;
  };
  // Without a mask, narrow blocks of 96 elements ask for more than the memory delivers: where more than 83 % of the
  // SMs read, the memory delivers a fifth less, unless the blocks read slower.
  const bool is_narrow = elements > kChunk && elements < 2 * kChunk && division->heads <= kMostHeads / 2;
  const auto asks_too_much = [&](int splits) {
    return is_narrow && problem.mask == nullptr && 100 * blocks * splits > 83 * slots;
  };
  int least = INT_MAX;
  const auto consider = [&](int splits, bool is_cluster) {
    const int at_once = std::max(1, slots * percent(splits, is_cluster) / 100);
    const int rounds = (blocks * splits + at_once - 1) / at_once, step = tokens_at_once * splits;
    const int read = tokens <= step ? (tokens + splits - 1) / splits : (tokens + step - 1) / step * tokens_at_once;
    const auto least_read =
        static_cast<int>((asks_too_much(splits) ? 124 : 100) * problem.tokens * blocks / (90 * slots));
    const auto heads = static_cast<int>(problem.batch * problem.query_heads);
    const int adding_up = splits == 1  ? 0
                          : is_cluster ? rounds * 256 * 128 / width
                                       : 320 * 128 / width + splits + 3 * heads * splits / device.sms;
    // Where the blocks leave no SMs, the kernel that adds up starts late.
    const int starting = splits > 1 && !is_cluster && 100 * blocks * splits > 76 * slots ? 300 * 128 / width : 0;
    const int time = std::max(rounds * read, least_read) + rounds * 192 * 128 / width + adding_up + starting;
    if (time >= least) return;
    least = time;
    division->splits = splits;
    division->is_cluster = is_cluster;
    division->is_paced = asks_too_much(splits) && tokens >= 1024 * splits;
  };
  consider(1, false);
  const int most = std::min(kMostSplits, tokens / kLeastTokens);
  const int clusters = compiled_capability() >= 90 ? kMostBlocksOfCluster : 0;
  for (int splits = 2; splits <= std::min(most, clusters); ++splits) consider(splits, true);
  for (int splits = 2; splits <= std::min(most, 16); ++splits) consider(splits, false);
  // More splits pay only where all blocks run at once: the most, or fewer that read no more tokens each.
  for (const int share : {84, 97}) {
    const int fitting = std::min(most, slots * share / 100 / blocks);
    if (fitting <= 16) continue;
    const int step = tokens_at_once * fitting, reads = (tokens + step - 1) / step;
    consider(fitting, false);
    consider((tokens + tokens_at_once * reads - 1) / (tokens_at_once * reads), false);
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace decode_step
