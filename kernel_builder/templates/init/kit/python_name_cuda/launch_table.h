// Launch configurations. To tune the kernel for a GPU or a dtype, edit kLaunchTable.
#pragma once

namespace op {

struct LaunchConfig {
  int element_bytes;  // which dtypes the row is for: 2 or 4; 0: any
  int threads;        // per block, a multiple of 32
  int loads;          // vectors per thread and input
};

// The first row that matches is used: put a row for one dtype before the general one. Note beside each row the reason
// and the GPU that it was measured on.
constexpr LaunchConfig kLaunchTable[] = {
    // One vector per thread: blocks are short, and PDL hides their start.
    {0, 256, 1},
};

constexpr LaunchConfig launch_config(int element_bytes) {
  for (const LaunchConfig& config : kLaunchTable) {
    if (config.element_bytes == 0 || config.element_bytes == element_bytes) return config;
  }
  return {};
}

static_assert(launch_config(2).threads > 0 && launch_config(4).threads > 0, "the table needs a row for each dtype");

}  // namespace op
