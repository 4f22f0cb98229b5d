// `${operator}`: the arithmetic of all backends, the arguments of a call, and the functions of the backends.
//
// Must not: include anything of Torch or CUDA.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace op {

// The result for an element x.
KIT_HOST_DEVICE float value(float x) { return x <= 0.0f ? 0.0f : x; }

// The gradient with respect to x, from the gradient of the result.
KIT_HOST_DEVICE float gradient(float grad, float x) { return x <= 0.0f ? 0.0f : grad; }

// The arguments of a call: contiguous tensors of one dtype.
struct Problem {
  kit::Type type;
  int64_t elements;
  const void* x;
  const void* grad;  // null: the forward pass
  void* out;         // the result, or the gradient with respect to x
};

// Computes elements `begin` to `end` in this thread.
void run_on_cpu(const Problem& problem, int64_t begin, int64_t end);

// Launches the kernel on `stream`, a cudaStream_t, and returns the cudaError_t of the launch.
int run_on_cuda(const Problem& problem, void* stream);

}  // namespace op
