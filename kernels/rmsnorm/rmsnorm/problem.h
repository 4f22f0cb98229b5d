// What one call of a kernel works on, in plain C++, so that device code compiles without Torch and once for every
// Torch.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// In all of them: `rows` rows of `hidden` elements each, both at least 1; the elements of a row are adjacent; strides
// and sizes are counted in elements; rows that are written to a bare pointer follow one another without gaps. The
// arithmetic is float32.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace rmsnorm {

using kit::Rows;
using kit::Type;

// The factor of an element is `offset` plus its weight.
struct Weight {
  const void* data = nullptr;  // null: all factors are one
  Type type = Type::float32;   // float32, or the type of the rows
  float offset = 0.0f;
};

// normed = round(sum * rstd * factor), where sum = round(x + residual), or x itself when there is no residual, and
// rstd = 1 / sqrt(mean(sum^2) + eps). With `rounded_before_weight`, round(round(sum * rstd) * factor), where the inner
// rounding is to `type`, and the outer one to `normed_type`.
struct Forward {
  int64_t rows, hidden;
  Type type;         // of x, residual and sum
  Type normed_type;  // `type`; or float32, with `rounded_before_weight` and a weight of that type
  bool rounded_before_weight;
  float eps;
  Rows x, residual;
  Weight weight;
  void* normed;  // null: written over x
  void* sum;     // written exactly when there is a residual; null: over the residual
};

// The gradients of `normed`, with roundings taken for exact, with respect to its input x (plus grad_sum, when there is
// one) and to its weight. rstd is computed again from x, which is read anyway.
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
