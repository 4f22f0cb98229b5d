// Launch configurations of geglu. To tune the kernels for another GPU, edit the table in this file and nothing else.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
#pragma once

#include <cstdint>
#include <iterator>
#include <type_traits>

namespace geglu {

enum class Pass { any, forward, backward };

// How a kernel accesses rows. "nd": leading dimensions do not fold into one; else rows are evenly strided.
enum class Access {
  vectors,  // rows are 16-byte aligned: one vector per load
  vectors_nd,
  unaligned,  // forward only, inputs at any alignment: aligned vectors, shifted in registers
  elements,   // rows at any alignment: one element per load
  elements_nd,
};

struct LaunchConfig {
  // Which calls the row is for.
  Pass pass;
  Access access;
  int min_capability;              // of the compiled code: 90 is 9.0; 0: any
  int element_bytes;               // 2 or 4; 0: any
  int64_t min_hidden, max_hidden;  // elements of a row; contiguous rows count as one
  int64_t min_elements;            // of the call

  // Configuration.
  int threads;  // per block, a multiple of 32
  int loads;    // vectors or elements per thread and input; always 1 for Access::unaligned
};

constexpr int64_t kNoLimit = INT64_MAX;

// The first row that matches is used: put a row for your GPU, pass or dtype before the general ones. The kernels are
// compiled for each row that can match their dtype. A call that matches no row of Access::unaligned is launched with
// Access::elements.
//
// Tuned on an H100 80GB HBM3 in bfloat16. "Reaches" is the share of copy speed there.
constexpr LaunchConfig kLaunchTable[] = {
    // pass, access, min_capability, element_bytes, min_hidden, max_hidden, min_elements, threads, loads

    // One vector per thread: blocks are short, and PDL hides their start. Reaches 1.00 to 1.04 (24 MB to 1.3 GB).
    {Pass::any, Access::vectors, 0, 0, 0, kNoLimit, 0, 256, 1},
    {Pass::any, Access::vectors_nd, 0, 0, 0, kNoLimit, 0, 256, 1},

    // From 512 elements per row on, few vectors span two rows. From 65536 elements on (32 blocks with 16-bit dtypes)
    // there are enough threads with a vector each. Reaches 1.02 (4096x4097).
    {Pass::forward, Access::unaligned, 0, 0, 512, int64_t{1} << 24, 65536, 256, 1},

    // Several elements per thread, since each load is small. The backward pass reaches 0.93 (4096x4097).
    {Pass::any, Access::elements, 0, 0, 0, kNoLimit, 0, 256, 4},

    // One element per thread: each load divides by the leading dimensions to find its row.
    {Pass::any, Access::elements_nd, 0, 0, 0, kNoLimit, 0, 256, 1},
};

// Whether a row can match calls of a pass, access and dtype.
constexpr bool is_for(const LaunchConfig& config, Pass pass, Access access, int element_bytes) {
  return (config.pass == Pass::any || config.pass == pass) && config.access == access &&
         (config.element_bytes == 0 || config.element_bytes == element_bytes);
}

// Calls `launch(row)` with the index of the first row that matches, as a std::integral_constant, and returns whether
// there is one. `capability(row)` returns what the kernel of a row was compiled for.
template <Pass kPass, Access kAccess, int kElementBytes, int kRow = 0, typename Capability, typename Launch>
bool dispatch_launch_config(int64_t rows, int64_t hidden, const Capability& capability, const Launch& launch) {
  if constexpr (kRow == static_cast<int>(std::size(kLaunchTable))) {
    return false;
  } else {
    constexpr LaunchConfig kConfig = kLaunchTable[kRow];
    constexpr std::integral_constant<int, kRow> row;
    if constexpr (is_for(kConfig, kPass, kAccess, kElementBytes)) {
      if (hidden >= kConfig.min_hidden && hidden <= kConfig.max_hidden && rows * hidden >= kConfig.min_elements &&
          (kConfig.min_capability == 0 || capability(row) >= kConfig.min_capability)) {
        launch(row);
        return true;
      }
    }
    return dispatch_launch_config<kPass, kAccess, kElementBytes, kRow + 1>(rows, hidden, capability, launch);
  }
}

// Whether every call finds a row.
constexpr bool is_complete() {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const Access access : {Access::vectors, Access::vectors_nd, Access::elements, Access::elements_nd}) {
      for (const int element_bytes : {2, 4}) {
        bool found = false;
        for (const LaunchConfig& config : kLaunchTable) {
          found = found || (is_for(config, pass, access, element_bytes) && config.min_capability == 0 &&
                            config.min_hidden <= 1 && config.max_hidden == kNoLimit && config.min_elements <= 1);
        }
        if (!found) return false;
      }
    }
  }
  return true;
}
static_assert(is_complete(), "the table needs a row without limits for each pass, access and dtype");

}  // namespace geglu
