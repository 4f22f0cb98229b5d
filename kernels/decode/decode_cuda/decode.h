// The kernels of one decoding step on CUDA. Each launches on the current device and returns a cudaError_t, 0 on
// success.
#pragma once

#include "decode/problem.h"

namespace decode_step {

// `constant_weights`: whether no kernel that may still run writes the weights. Reading them begins at once then.
int linear(const Linear& problem, bool constant_weights, void* stream);

// Sets *floats to the size of the scratch memory that `attention` needs in `parts`.
int attention_parts(const Attention& problem, int64_t* floats);

// For 16-bit dtypes, from capability 8.0 on; heads of at most 256 elements that start at 16-byte boundaries.
// `constant_cache`: whether no kernel that may still run writes key and value. Reading them begins at once then.
int attention(const Attention& problem, bool constant_cache, void* stream);

}  // namespace decode_step
