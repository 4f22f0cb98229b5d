// RMSNorm and rotary embedding in one pass, on CUDA. The functions return a cudaError_t, 0 on success.
#pragma once

#include "rope3d/norm_problem.h"

namespace rope3d {

// Launches on the current device.
int norm_rotate(const NormRotation& problem, void* stream);

// Launches on the current device. Needs `parts` if a gradient of a weight is requested.
int norm_rotate_backward(const NormRotation& problem, void* stream);

// Sets *parts for a backward problem, whose pointers to tensors are set.
int norm_partial_sums(const NormRotation& problem, int64_t* parts);

}  // namespace rope3d
