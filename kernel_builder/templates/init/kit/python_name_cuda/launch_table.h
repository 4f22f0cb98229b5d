// Launch configurations. To tune the kernel for a GPU or a dtype, edit kLaunchTable.
#pragma once

#include "kit/launch_table.h"

namespace op {

struct LaunchConfig : kit::LaunchKey<LaunchConfig> {
  LAUNCH_FIELD(int, threads, 256)  // per block, a multiple of 32
  LAUNCH_FIELD(int, loads, 1)      // vectors per thread and input
};

// The first row that serves a call is used: put a row for one dtype before the general one, for example
// LaunchConfig().for_dtypes(kit::kFloat32).with_loads(2). Note beside each row the reason and the GPU that it was
// measured on.
constexpr LaunchConfig kLaunchTable[] = {
    // One vector per thread: blocks are short, and PDL hides their start.
    LaunchConfig(),
};
static_assert(kit::serves_all(kLaunchTable), "the table needs a row for each dtype");

}  // namespace op
