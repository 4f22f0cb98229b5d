// How a call of linear layers is divided among blocks and warps: a part of linear.cu.
//
// Reads:    nothing.
// Must not: depend on the contents of tensors, so that a CUDA graph holds for all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace decode_step {
namespace {

// How a tile is read: each thread reads `vectors` vectors of each of its rows at a time, of which `ahead` times are in
// flight. So many blocks per SM have the registers. `cost`: of the time, in percent, see `choose`. `clusters`: whether
// the blocks of a cluster can share a tile. `loops`: whether blocks compute several tiles, as all do that normalize x,
// and load the next one while they add up the one before.
struct Plan {
  int warps, vectors, ahead, blocks_per_sm, cost;
  bool clusters = false, loops = false;
};
constexpr Plan kPlans[] = {{16, 2, 2, 1, 1000},     {16, 1, 2, 2, 104}, {8, 1, 3, 3, 105, true},
                           {4, 2, 2, 5, 115, true}, {4, 1, 5, 4, 100},  {4, 1, 3, 5, 106, false, true},
                           {8, 1, 4, 2, 1000}};
constexpr int kMostBlocksOfCluster = 8;

// The number of a plan, and blocks that share a tile.
struct Choice {
  int plan, cluster;
};

// Chooses for so many tiles: all blocks should run at once, and then with as many bytes in flight as possible.
Choice choose(int64_t tiles, int64_t sms, int64_t inputs, bool constant_weights, bool has_clusters) {
  // A new block for each tile takes longer than the few loads.
  if (inputs <= 2048 && tiles > (inputs > 320 ? 8 : 5) * sms && tiles <= 10 * sms) return {5, 1};
  if (has_clusters && inputs >= 4608 && (inputs < 8192 ? 4 : 3) * tiles <= sms) return {2, kMostBlocksOfCluster};
  if (has_clusters && inputs >= 9216 && 2 * tiles > sms && 10 * tiles <= 7 * sms) return {2, 4};
  if (tiles <= sms) return {0, 1};
  if (has_clusters && inputs >= 4096 && 13 * tiles <= 15 * sms) return {3, 4};
  if (has_clusters && inputs >= 4096 && 2 * tiles <= 3 * sms) return {2, 2};
  // Without loads before the grid wait, the small blocks of the other plans do not take less time.
  const bool is_long = inputs >= 640 || !constant_weights;
  if (is_long && tiles <= 2 * sms) return {1, 1};
  if (has_clusters && inputs >= 5632 && 2 * tiles <= 5 * sms) return {3, 2};
  if (is_long && tiles <= 3 * sms) return {2, 1};
  if (inputs >= 5632 && 2 * tiles <= 7 * sms) return {1, 1};
  // Some SMs are idle at the end, and some loads are past the last input. Of few inputs, sums of 16 warps take longer.
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

// Chooses plan 2, 5 or 6 for blocks that normalize x: fewer per SM take less time (H200, 1 row, 896 to 8,192 inputs).
int choose_for_norm(int64_t tiles, int64_t sms, int64_t inputs) {
  const bool is_narrow = inputs <= 1536, has_few_tiles = tiles <= 16 * sms;
  if (tiles <= 2 * sms) return 6;
  if (tiles <= 3 * sms || (is_narrow && has_few_tiles && inputs % 768 == 0)) return 2;
  return is_narrow || (inputs <= 2560 && inputs % 1024 != 0 && has_few_tiles) ? 5 : 6;
}

// Regions where cuBLAS takes less time (H200, up to 5 %, or 18 % where the kernel waits for the weights), since some
// SMs are idle at the end: by rows of x, inputs, and tiles of ten SMs.
struct Region {
  int least_rows;
  bool constant_weights;  // also then
  int least_inputs, most_inputs, above_tiles, most_tiles;
};
constexpr Region kTorchRegions[] = {{8, true, 5120, 8448, 62, 71},
                                    {4, false, 2304, 8448, 62, 71},
                                    {1, false, 392, 2304, 50, 83},
                                    {1, false, 2304, 3712, 20, 22},
                                    {3, false, 4096, 6144, 24, 25}};

}  // namespace
}  // namespace decode_step
