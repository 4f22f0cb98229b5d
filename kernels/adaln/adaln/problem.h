// What one call of a kernel works on, in plain C++, so that device code compiles without Torch and once for every
// Torch.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// In all of them: `rows` rows of `hidden` elements each, both at least 1; the elements of a row are adjacent; strides
// and sizes are counted in elements; rows that are written follow one another without gaps. The arithmetic is float32,
// and each result is rounded once, unless it says otherwise.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace adaln {

using kit::Rows;
using kit::Type;

// A weight or a bias, the same for all rows.
struct Parameter {
  const void* data = nullptr;  // null: there is none
  Type type = Type::float32;   // float32, or the type of the rows
};

// A scale, a shift or a gate: a row of it for each `span` rows of the problem, one span after another.
struct Modulation {
  Rows rows;                  // data null: there is none
  Type type = Type::float32;  // float32, or the type of the problem's rows
};

// sum = residual + branch * gate.
struct Gate {
  int64_t rows, hidden;
  Type type;      // of residual, branch and sum
  bool stepwise;  // whether the product is rounded, too
  Rows residual, branch;
  int64_t span;
  Modulation gate;
  void* sum;
};

// normed = (n * weight + bias) * (1 + scale) + shift, where n = (x - mean(x)) / sqrt(var(x) + eps) or, without the
// mean, n = x / sqrt(mean(x^2) + eps). With a branch, x is the rounded sum of the residual `x` and the gated branch,
// which is written, too.
struct Forward {
  int64_t rows, hidden;
  Type type;  // of x, branch, normed and sum
  float eps;
  bool centered;  // whether the mean is subtracted
  bool stepwise;  // whether n * weight + bias, 1 + scale, and the products with scale and gate are rounded, too
  Rows x, branch;
  int64_t span;
  Modulation gate, scale, shift;
  Parameter weight, bias;
  void* normed;
  void* sum;  // written exactly when there is a branch
};

// Sums over rows, which gradients of what several rows share need. They are float32 sums of partial sums, so that they
// do not depend on the order in which threads finish: the rows fall into `groups` of equal size, one after another, and
// each of these into `parts`. A group is a span or, where every row has a modulation of its own, all of the rows.
struct Sums {
  // [groups, parts, count, hidden]; null: none is asked for. On CUDA a single row needs none.
  float* partial;
  int64_t groups, parts;
  int count;
};

// What is summed. Where every row has a modulation of its own, slope is grad * (1 + scale), and no gate is summed; else
// slope is grad, and 1 + scale comes in with the groups.
constexpr int kSlopeTimesNormed = 0, kSlope = 1, kGate = 2;

// The gradients of `normed` with respect to x, scale, shift, weight and bias; and of `normed` and `sum` with respect to
// the residual, which grad_x then is, the branch and the gate. The norm is computed again from x, which is read anyway.
struct Backward {
  int64_t rows, hidden;
  Type type;  // of grad, x, grad_sum, branch, grad_x and grad_branch
  float eps;
  bool centered;
  Rows grad, x;   // x: with a branch, the sum
  Rows grad_sum;  // what is added to the gradient of x; data null: nothing
  Rows branch;    // data null: there is none, and no gate
  int64_t span;
  Modulation gate, scale;
  Parameter weight, bias;
  void* grad_x;
  void* grad_branch;
  // Each null when it is not asked for; of the types of what they are the gradients of; [rows / span, hidden] or
  // [hidden]. Where every row has a modulation of its own, grad_shift is `grad` and not written here.
  void *grad_scale, *grad_shift, *grad_gate, *grad_weight, *grad_bias;
  Sums sums;
};

// The gradients of Gate's `sum` with respect to branch and gate. That with respect to the residual is `grad`.
struct GateBackward {
  int64_t rows, hidden;
  Type type;  // of grad, branch and grad_branch
  Rows grad, branch;
  int64_t span;
  Modulation gate;
  void* grad_branch;
  void* grad_gate;  // null: not asked for
  Sums sums;        // of one kind, the gate's
};

}  // namespace adaln
