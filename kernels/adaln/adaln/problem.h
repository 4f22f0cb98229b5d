// The arguments of the kernels, in plain C++, so that device code compiles without Torch, and once for all versions of
// it.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// Every problem has `rows` rows of `hidden` elements, both at least 1. The elements of a row are contiguous. Strides
// and sizes are in elements. Rows that are written are contiguous. Arithmetic is float32, and each result is rounded
// once, except where noted.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace adaln {

using kit::Parameter;
using kit::Rows;
using kit::Type;

// A scale, a shift or a gate: one row for each span of `span` consecutive rows of the problem.
struct Modulation {
  Rows rows;                  // data null: there is none
  Type type = Type::float32;  // float32, or the dtype of the problem's rows
};

// normed = (n * weight + bias) * (1 + scale) + shift, where n = (x - mean(x)) / sqrt(var(x) + eps) or, without the
// mean, n = x / sqrt(mean(x^2) + eps). With a branch, x is the rounded sum of the residual `x` and the branch, times
// the gate if there is one; the sum is written, too.
struct Forward {
  int64_t rows, hidden;
  Type type;  // of x, branch, normed and sum
  float eps;
  bool centered;  // the mean is subtracted
  bool stepwise;  // n * weight + bias, 1 + scale, and the products with scale and gate are rounded, too
  Rows x, branch;
  int64_t span;
  Modulation gate, scale, shift;
  Parameter weight, bias;
  void* normed;  // null: the sum alone
  void* sum;     // written if and only if there is a branch
};

// Two-stage sums over rows, for the gradients of modulations and parameters that several rows share. The rows are
// divided into `groups` of equal size, and each group into `parts`. Partial sums of the parts are float32 and are added
// in a fixed order, so that results do not depend on the order in which threads finish. A group is a span or, where
// every row has its own modulation, all of the rows.
struct Sums {
  float* partial;  // [groups, parts, count, hidden]; null: no sums are requested. On CUDA a single row needs none.
  int64_t groups, parts;
  int count;

  KIT_HOST_DEVICE int gate() const { return count - 1; }  // the index of the gate's sum, if there is one
};

// Indices of the sums. `slope` is grad, and 1 + scale is multiplied in for each group; where every row has its own
// modulation, slope is grad * (1 + scale), and there is no sum for the gate. Without a norm that is the only sum.
constexpr int kSlopeTimesNormed = 0, kSlope = 1, kGate = 2;

// The gradients of `normed` with respect to x, scale, shift, weight and bias. With a gate, the gradients of `normed`
// and `sum` with respect to the residual (grad_x), the branch and the gate, too. Without a gate, the gradient with
// respect to the branch is grad_x. The norm is computed again from x, which the kernels read in any case. Without x
// there is no norm: grad_sum is the gradient of `sum`, and of the residual.
struct Backward {
  int64_t rows, hidden;
  Type type;  // of grad, x, grad_sum, branch, grad_x and grad_branch
  float eps;
  bool centered;
  Rows grad, x;   // x: with a branch, the sum
  Rows grad_sum;  // added to the gradient of x; data null: there is none
  Rows branch;    // data null: there is none, or no gate
  int64_t span;
  Modulation gate, scale;
  Parameter weight, bias;
  void* grad_x;
  void* grad_branch;
  // [rows / span, hidden] or [hidden], in the dtypes of the tensors whose gradients they are; null: not requested.
  // Where every row has its own modulation, grad_shift is `grad` and not written by the kernels.
  void *grad_scale, *grad_shift, *grad_gate, *grad_weight, *grad_bias;
  Sums sums;
};

// CUDA: launch on the current device, and return a cudaError_t, 0 on success.
int run(const Forward& problem, void* stream);
int run(const Backward& problem, void* stream);

// The CPU: compute the rows, or the parts of all groups, from `begin` to `end`. The caller divides them among threads.
void run(const Forward& problem, int64_t begin, int64_t end);
void run(const Backward& problem, int64_t begin, int64_t end);

// The CPU: compute the columns from `begin` to `end` of the gradients that are sums over rows, from all partial sums.
void reduce(const Backward& problem, int64_t begin, int64_t end);

// Set the number of parts of each group, on the current device. Return a cudaError_t, 0 on success.
int partial_sums(const Backward& problem, int64_t* parts);

}  // namespace adaln
