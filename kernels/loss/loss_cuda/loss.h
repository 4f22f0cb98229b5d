// Cross entropy and its gradient on CUDA. Launches on the current device; returns a cudaError_t, 0 on success.
#pragma once

#include "loss/problem.h"

namespace loss {

int cross_entropy(const CrossEntropy& problem, void* stream);

}  // namespace loss
