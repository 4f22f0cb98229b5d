// The activations of a gate, in float32.
//
// A decoding step has so few gates that accurate functions of the CUDA math library cost no time.
#pragma once

#include "decode/problem.h"

namespace decode_step {

__device__ __forceinline__ float activated(float x, Activation activation) {
  if (activation == Activation::gelu) return 0.5f * x * erfcf(-0.707106781f * x);
  // That of gelu_tanh, x / 2 * (1 + tanh(y)), is x * sigmoid(2 * y), which does not cancel.
  const float y = activation == Activation::silu ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
  return x / (1.0f + expf(-y));
}

}  // namespace decode_step
