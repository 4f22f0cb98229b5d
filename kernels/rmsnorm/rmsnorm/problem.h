// What one call of a kernel works on, in plain C++, so that device code compiles without Torch and once for every
// Torch.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// In all of them: `rows` rows of `hidden` elements each, both at least 1; the elements of a row are adjacent; strides
// and sizes are counted in elements; rows that are written follow one another without gaps. The arithmetic is float32,
// and each result is rounded once.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace rmsnorm {

using kit::Rows;
using kit::Type;

struct Weight {
  const void* data = nullptr;  // null: all ones
  Type type = Type::float32;   // float32, or the type of the rows
};

// normed = round(sum * rstd * weight), where sum = round(x + residual), or x itself when there is no residual, and
// rstd = 1 / sqrt(mean(sum^2) + eps).
struct Forward {
  int64_t rows, hidden;
  Type type;  // of x, residual, normed and sum
  float eps;
  Rows x, residual;
  Weight weight;
  void* normed;
  void* sum;  // written exactly when there is a residual
};

// The gradients of `normed` with respect to its input x (plus grad_sum, when there is one) and to its weight. rstd is
// computed again from x, which is read anyway.
struct Backward {
  int64_t rows, hidden;
  Type type;  // of grad, x, grad_sum and grad_x
  float eps;
  Rows grad, x, grad_sum;
  Weight weight;
  void* grad_x;
  // The gradient of the weight is the sum over rows of float32 partial sums, of which there are `parts`, so that it
  // does not depend on the order in which threads finish. Null: not asked for.
  float* partial;  // [parts, hidden]
  int64_t parts;
  void* grad_weight;  // of the weight's type
};

}  // namespace rmsnorm
