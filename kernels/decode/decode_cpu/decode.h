// The kernels of one decoding step on the CPU. The caller splits the ranges over threads.
#pragma once

#include "decode/problem.h"

namespace decode_step {

// Computes the columns `begin` to `end` of `out`.
void linear(const Linear& problem, int64_t begin, int64_t end);

// The number of groups of query heads that read the same keys, over all sequences.
int64_t attention_groups(const Attention& problem);

// Computes the groups `begin` to `end`.
void attention(const Attention& problem, int64_t begin, int64_t end);

}  // namespace decode_step
