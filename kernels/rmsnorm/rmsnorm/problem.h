// The arguments of one call, in plain C++: device code needs no Torch and is compiled once for all versions of it.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// Every problem has `rows` rows of `hidden` elements each, both at least 1. The elements of a row are contiguous.
// Strides and sizes are in elements. A tensor given by a bare pointer is contiguous. The arithmetic is float32.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace rmsnorm {

using kit::Rows;
using kit::Type;

// The factor of column i is weight[i] + offset, or 1 without a weight.
struct Weight : kit::Parameter {
  float offset = 0.0f;
};

// normed = round(sum * rstd * factor), where sum = round(x + residual), or x if there is no residual, and
// rstd = 1 / sqrt(mean(sum^2) + eps). With `rounded_before_weight` it is round(round(sum * rstd) * factor); the inner
// rounding is to `type`, the outer one to `normed_type`.
struct Forward {
  int64_t rows, hidden;
  Type type;         // of x, residual and sum
  Type normed_type;  // `type`; or float32, with `rounded_before_weight` and a float32 weight
  bool rounded_before_weight;
  float eps;
  Rows x, residual;
  Weight weight;
  void* normed;  // null: overwrites x
  void* sum;     // written if there is a residual; null: overwrites the residual
};

// x is the forward pass's `sum`. grad_x is the gradient with respect to x, plus grad_sum if present; grad_weight is the
// gradient with respect to the weight. Both ignore the roundings. rstd is recomputed from x, which the kernels read in
// any case.
struct Backward {
  int64_t rows, hidden;
  Type type;  // of grad, x, grad_sum and grad_x
  float eps;
  Rows grad, x, grad_sum;
  Weight weight;
  void* grad_x;
  // Two-stage reduction of the weight's gradient: `parts` rows of float32 partial sums, added up in a fixed order, so
  // that equal inputs give equal bits. partial is null if the gradient is not requested.
  float* partial;  // [parts, hidden]
  int64_t parts;
  void* grad_weight;  // of the weight's dtype
};

// CUDA: launch on the current device, and return a cudaError_t, 0 on success. grad_weight is computed if there is
// `partial`.
int run(const Forward& problem, void* stream);
int run(const Backward& problem, void* stream);

// The CPU: compute the rows [begin, end), or the parts: grad_x for their rows, and their partial sums. The caller
// divides them among threads.
void run(const Forward& problem, int64_t begin, int64_t end);
void run(const Backward& problem, int64_t begin, int64_t end);

// The CPU: computes the columns [begin, end) of the gradient of the weight from all partial sums.
void reduce_weight_gradient(const Backward& problem, int64_t begin, int64_t end);

// Sets the number of parts on the current device. Returns a cudaError_t, 0 on success.
int partial_sums(const Backward& problem, int64_t* parts);

}  // namespace rmsnorm
