// SiLU, x * sigmoid(x): the arguments of a call, and the arithmetic of all backends.
//
// Must not: include anything of Torch or CUDA.
#pragma once

#include <cmath>
#include <cstdint>

#include "kit/rows.h"

namespace op {

// The tensors are contiguous and have one dtype.
struct Problem {
  kit::Type type;
  int64_t elements;
  const void* x;
  const void* grad;  // null: the forward pass
  void* out;         // y, or the gradient with respect to x
};

KIT_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

KIT_HOST_DEVICE float value(float x) { return x * sigmoid(x); }

KIT_HOST_DEVICE float derivative(float x) {
  const float s = sigmoid(x);
  return s * (1.0f + x * (1.0f - s));
}

}  // namespace op
