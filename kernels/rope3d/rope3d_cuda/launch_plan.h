// Maps the columns, heads and tokens of a call to threads and blocks, as a row of the launch table says.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rope3d/problem.h"
#include "rope3d_cuda/launch_table.h"

namespace rope3d {

// Where the angles come from: the tables of a token grid, whose axes own contiguous ranges of pairs or are interleaved;
// or a table with one row per token.
enum class Source { contiguous_axes, interleaved_axes, tokens };

// With interleaved axes a thread has heads of both tensors, else of one.
constexpr bool has_both_sides(Source source) { return source == Source::interleaved_axes; }

struct LaunchPlan {
  int64_t groups[kMaxSides];  // a thread has the heads group, group + groups, ...
  // In y a block has groups of heads and in z tokens; the other way round if the stride of a token is the smaller one.
  bool token_major;
  int64_t tokens_per_block, groups_per_block;
  int64_t q_blocks;             // in z: blocks of k come after them
  int64_t blocks_per_sequence;  // in x
  bool interleave_sequences, alternate_sides, early_trigger;
  int64_t threads[3], blocks[3];  // x: columns of a head, and sequences and tokens
};

constexpr int64_t ceil_div(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Sets the threads of a block. A block has whole tokens if they are small enough, else parts of about equal size. The
// parts of one token may run long after one another.
inline void plan_block(const Rotation& problem, const LaunchConfig& config, int64_t columns, bool small,
                       LaunchPlan& plan) {
  constexpr int64_t kMaxThreadsZ = 64;  // of any CUDA device
  auto& [x, y, z] = plan.threads;
  x = ceil_div(columns, ceil_div(columns, config.max_threads));
  const auto rows = [x = x](int64_t threads) { return std::max<int64_t>(threads / x, 1); };
  const int64_t groups = std::max(plan.groups[0], plan.groups[1]);
  if (plan.token_major) {
    y = std::min(rows(small ? config.small_launch_threads : config.token_major_threads), problem.tokens);
    z = 1;
  } else {
    y = ceil_div(groups, ceil_div(groups, rows(small ? config.small_launch_threads : config.max_threads)));
    z = std::min({std::max<int64_t>(config.min_threads / (x * y), 1), problem.tokens, kMaxThreadsZ});
  }
  plan.tokens_per_block = plan.token_major ? y : z;
  plan.groups_per_block = plan.token_major ? z : y;
}

// Sets the blocks of a launch and their order.
inline void plan_grid(const Rotation& problem, const LaunchConfig& config, Source source, int64_t columns,
                      LaunchPlan& plan) {
  const bool has_k = problem.sides[1].heads > 0;
  plan.q_blocks = ceil_div(plan.groups[0], plan.groups_per_block);
  const int64_t k_blocks = has_both_sides(source) ? 0 : ceil_div(plan.groups[1], plan.groups_per_block);
  plan.blocks_per_sequence = ceil_div(problem.tokens, plan.tokens_per_block);
  plan.interleave_sequences =
      source == Source::tokens && problem.table.batch_stride == 0 && problem.batch <= config.max_interleaved_sequences;
  auto& [x, y, z] = plan.blocks;
  x = problem.batch * plan.blocks_per_sequence;
  y = ceil_div(columns, plan.threads[0]);
  z = plan.q_blocks + k_blocks;
  plan.alternate_sides =
      source == Source::tokens && !plan.token_major && has_k && x > config.side_blocks && x < INT32_MAX / 4;
  if (plan.alternate_sides) {
    x = kMaxSides * config.side_blocks * ceil_div(x, config.side_blocks);
    z = std::max(plan.q_blocks, k_blocks);
  }
  plan.early_trigger = x * y * z <= config.early_trigger_blocks;
}

// Maps `columns` columns of each head to threads.
inline LaunchPlan plan_launch(const Rotation& problem, const LaunchConfig& config, Source source, int64_t columns,
                              int sms) {
  const Side(&sides)[kMaxSides] = problem.sides;
  const int64_t heads = sides[0].heads + sides[1].heads;
  const int64_t threads = problem.batch * problem.tokens * columns * heads / config.heads_per_thread;
  const bool small = threads < int64_t{config.small_launch_per_sm} * sms;
  const int64_t per_group = has_both_sides(source) ? config.heads_per_thread / kMaxSides : config.heads_per_thread;
  LaunchPlan plan{};
  for (int i = 0; i < kMaxSides; ++i) plan.groups[i] = small ? sides[i].heads : ceil_div(sides[i].heads, per_group);
  if (has_both_sides(source)) plan.groups[0] = std::max(plan.groups[0], plan.groups[1]);
  plan.token_major = sides[0].from_strides.token < sides[0].from_strides.head;
  plan_block(problem, config, columns, small, plan);
  plan_grid(problem, config, source, columns, plan);
  return plan;
}

}  // namespace rope3d
