// Rotation on CUDA. Launches on the current device and returns a cudaError_t, 0 on success.
#pragma once

#include "rope3d/problem.h"

namespace rope3d {

int rotate(const Rotation& problem, void* stream);

}  // namespace rope3d
