// What one call of a kernel works on, in plain C++, so that device code compiles without Torch and once for every
// Torch.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// In all of them: `rows` rows of `hidden` elements each, both at least 1; the elements of a row are adjacent; strides
// and sizes are counted in elements. The arithmetic is float32, and each result is rounded once.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace geglu {

using kit::Rows;
using kit::Type;

enum class Approximate : int { none, tanh };

// out = round(up * gelu(gate)), its rows one after another.
struct Forward {
  int64_t rows, hidden;
  Type type;  // of all tensors
  Approximate approximate;
  Rows gate, up;
  void* out;
};

// grad_gate = round(grad * up * gelu'(gate)), grad_up = round(grad * gelu(gate)).
struct Backward {
  int64_t rows, hidden;
  Type type;  // of all tensors
  Approximate approximate;
  Rows grad, gate, up;
  void *grad_gate, *grad_up;
  int64_t stride;  // between rows of grad_gate, and of grad_up
};

}  // namespace geglu
