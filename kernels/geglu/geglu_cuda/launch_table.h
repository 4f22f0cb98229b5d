// Launch configurations of geglu. To tune the kernels for another GPU, edit the table in this file and nothing else.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
#pragma once

#include <cstdint>

#include "kit/launch_table.h"

namespace geglu {

// How a kernel accesses rows.
enum class Access : unsigned {
  vectors = 1,   // rows are 16-byte aligned: one vector per load
  elements = 2,  // rows at any alignment: one element per load
};

// widths: elements of a row; contiguous rows count as one.
struct LaunchConfig : kit::LaunchKey<LaunchConfig> {
  LAUNCH_FIELD(int, threads, 256)  // per block, a multiple of 32
  LAUNCH_FIELD(int, loads, 1)      // vectors or elements per thread and input
};

// Tuned on an H100 80GB HBM3 in bfloat16. "Reaches" is the share of copy speed there.
constexpr LaunchConfig kLaunchTable[] = {
    // One vector per thread: blocks are short, and PDL hides their start. Reaches 1.00 to 1.04 (24 MB to 1.3 GB).
    LaunchConfig().for_variants(Access::vectors),

    // Several elements per thread, since each load is small. The backward pass reaches 0.93 (4096x4097).
    LaunchConfig().for_variants(Access::elements).with_loads(4),
};

static_assert(kit::serves_all(kLaunchTable, Access::vectors) && kit::serves_all(kLaunchTable, Access::elements),
              "the table needs a row without limits for each access and dtype");

}  // namespace geglu
