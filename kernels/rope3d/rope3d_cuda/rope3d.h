// Rotation on CUDA: launches on the current device. Returns a cudaError_t, 0 when the launch succeeded.
#pragma once

#include "rope3d/problem.h"

namespace rope3d {

int rotate(const Rotation& problem, void* stream);

}  // namespace rope3d
