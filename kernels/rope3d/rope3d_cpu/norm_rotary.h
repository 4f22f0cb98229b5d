// RMSNorm and rotary embedding in one pass, on the CPU.
#pragma once

#include "rope3d/norm_problem.h"

namespace rope3d {

// Computes the tokens [begin, end) of all sequences.
void norm_rotate(const NormRotation& problem, int64_t begin, int64_t end);

// The number of parts into which the backward pass divides the tokens.
int64_t norm_partial_sums(const NormRotation& problem);

// Computes the parts [begin, end): the gradients of q and k, and the partial sums of the weights' gradients.
void norm_rotate_backward(const NormRotation& problem, int64_t begin, int64_t end);

// Adds the partial sums of a side, and writes the elements [begin, end) of its weight's gradient.
void reduce_norm_weight(const NormRotation& problem, int side, int64_t begin, int64_t end);

}  // namespace rope3d
