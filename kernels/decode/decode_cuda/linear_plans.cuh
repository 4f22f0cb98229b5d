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
// flight. So many blocks per SM have the registers. `clusters`: whether the blocks of a cluster can share a tile.
// `loops`: whether blocks compute several tiles, as all do that normalize x, and load the next one while they add up
// the one before.
struct Plan {
  int warps, vectors, ahead, blocks_per_sm;
  bool clusters = false, loops = false;
};
constexpr Plan kPlans[] = {{16, 2, 2, 1},      {16, 1, 2, 2}, {8, 1, 3, 3, true},
                           {8, 1, 2, 4},       {4, 1, 3, 6},  {4, 1, 3, 5, false, true},
                           {4, 2, 2, 5, true}, {4, 1, 2, 8},  {8, 1, 4, 2}};

// The number of a plan, and blocks that share a tile.
struct Choice {
  int plan, cluster;
};

// The first range that has a call chooses: tiles in percent of the SMs, inputs, and weights, which are awaited where
// the previous kernel may write them. All blocks run at once, if they can; small ones start beside the previous kernel.
// On an H200, 938 choices took 1.02 times the time of the fastest of 60 plans and clusters, in the mean.
enum Weights { any, constant, awaited };
constexpr int kMost = 1 << 30;
struct Range {
  int most_percent, least_inputs, most_inputs;
  Weights weights;
  Choice choice;
};
constexpr Range kRanges[] = {
    {330, 0, 256, awaited, {7, 1}},  {25, 4225, kMost, any, {2, 8}},    {33, 8192, kMost, any, {2, 8}},
    {800, 0, 256, constant, {7, 1}}, {600, 0, 384, constant, {4, 1}},   {330, 0, 512, constant, {3, 1}},
    {400, 0, 512, constant, {6, 1}}, {50, 0, 384, awaited, {4, 1}},     {200, 0, 512, awaited, {3, 1}},
    {50, 0, kMost, any, {0, 1}},     {66, 4352, kMost, any, {2, 4}},    {100, 0, 1024, any, {1, 1}},
    {100, 0, kMost, any, {0, 1}},    {115, 6144, kMost, any, {6, 4}},   {105, 3840, kMost, any, {1, 1}},
    {150, 3840, kMost, any, {2, 2}}, {200, 0, 768, constant, {2, 1}},   {200, 0, kMost, any, {1, 1}},
    {250, 7040, kMost, any, {6, 2}}, {300, 0, kMost, any, {2, 1}},      {370, 5632, kMost, any, {1, 1}},
    {400, 0, kMost, any, {3, 1}},    {500, 513, 2560, any, {6, 1}},     {500, 513, kMost, any, {5, 1}},
    {600, 0, kMost, any, {4, 1}},    {640, 1409, 8192, any, {3, 1}},    {800, 0, 2560, any, {7, 1}},
    {800, 0, 8192, any, {3, 1}},     {1000, 385, 512, awaited, {7, 1}}, {1000, 0, 2048, any, {5, 1}},
    {900, 0, 8192, any, {2, 1}},     {1400, 3840, kMost, any, {1, 1}},  {2500, 0, 384, any, {5, 1}},
    {kMost, 0, 256, any, {7, 1}},    {kMost, 0, 384, any, {4, 1}},      {kMost, 0, 1152, any, {7, 1}},
    {kMost, 0, 1408, any, {5, 1}},   {kMost, 1985, 2048, any, {3, 1}},  {kMost, 0, 6144, any, {4, 1}}};

Choice choose(int64_t tiles, int64_t sms, int64_t inputs, bool constant_weights, bool has_clusters) {
  for (const auto& [percent, least, most, weights, choice] : kRanges) {
    if (100 * tiles <= percent * sms && inputs >= least && inputs <= most && (has_clusters || choice.cluster == 1) &&
        weights != (constant_weights ? awaited : constant))
      return choice;
  }
  return {1, 1};
}

// Chooses plan 2, 5 or 8 for blocks that normalize x: fewer per SM take less time (H200, 1 row, 896 to 8,192 inputs).
int choose_for_norm(int64_t tiles, int64_t sms, int64_t inputs) {
  const bool is_narrow = inputs <= 1536, has_few_tiles = tiles <= 16 * sms;
  if (tiles <= 2 * sms) return 8;
  if (tiles <= 3 * sms || (is_narrow && has_few_tiles && inputs % 768 == 0)) return 2;
  return is_narrow || (inputs <= 2560 && inputs % 1024 != 0 && has_few_tiles) ? 5 : 8;
}

// Regions where cuBLAS takes less time, since some SMs are idle at the end, or since the lanes that read a row straddle
// segments of 64 bytes: by rows of x, inputs, and tiles of ten SMs. On an H200, the kernel takes 1.03 times as long in
// the mean of 269 calls, and at most 1.22 times. cuBLAS needs outputs that are a multiple of 8: else it takes up to
// five times as long.
struct Region {
  int least_rows;
  bool straddling;  // only rows of weights that are no multiple of 64 bytes
  Weights weights;
  int least_inputs, most_inputs, above_tiles, most_tiles;
};
constexpr Region kTorchRegions[] = {{1, false, any, 4096, 6656, 79, 84},     {1, false, any, 5120, 8448, 60, 66},
                                    {1, false, awaited, 448, 4096, 80, 84},  {6, false, awaited, 1088, 5120, 62, 66},
                                    {4, false, awaited, 2304, 3712, 20, 22}, {3, false, awaited, 4096, 6144, 24, 25},
                                    {5, false, awaited, 1664, 5120, 21, 26}, {7, false, awaited, 1536, 2560, 37, 68},
                                    {5, true, any, 1664, 20480, 60, 100},    {7, true, any, 3584, 8192, 25, 54},
                                    {3, true, any, 12288, 20480, 25, 35},    {2, true, any, 15360, 20480, 50, 60},
                                    {7, true, awaited, 1664, 20480, 30, 56}, {2, true, awaited, 18700, 20480, 4, 76},
                                    {3, true, awaited, 2560, 14848, 30, 35}, {2, true, awaited, 576, 1728, 60, 94},
                                    {5, true, awaited, 960, 6144, 20, 28},   {3, true, awaited, 12160, 15104, 12, 26},
                                    {4, true, any, 1984, 6912, 72, 10000},   {1, false, awaited, 960, 2560, 40, 42},
                                    {1, false, awaited, 2880, 6400, 30, 33}, {1, false, awaited, 3072, 7424, 24, 26},
                                    {1, false, awaited, 3240, 7424, 50, 54}, {1, false, awaited, 2560, 8704, 66, 70},
                                    {1, false, awaited, 3584, 13376, 76, 80}};

}  // namespace
}  // namespace decode_step
