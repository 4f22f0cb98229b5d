// RMSNorm on CUDA. These functions launch on the current device and return a cudaError_t (0: success).
#pragma once

#include "rmsnorm/problem.h"

namespace rmsnorm {

// Computes normed, and sum if there is a residual.
int forward(const Forward& problem, void* stream);

// Sets *parts to the rows of partial sums that `backward` needs on the current device.
int partial_sums(int64_t rows, int64_t hidden, Type type, int64_t* parts);

// Computes grad_x, and grad_weight if problem.partial is given.
int backward(const Backward& problem, void* stream);

}  // namespace rmsnorm
