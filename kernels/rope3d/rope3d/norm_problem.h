// The arguments of RMSNorm and rotary embedding in one pass, in plain C++.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
#pragma once

#include <cstdint>

#include "rope3d/problem.h"

namespace rope3d {

// The RMSNorm of one of the tensors of a rotation. The factor of an element is its weight plus the offset.
struct SideNorm {
  const void* weight = nullptr;      // contiguous, one entry per element of a row; null: all factors are 1
  Type weight_type = Type::float32;  // float32, or the dtype of q

  // Only in the backward pass.
  const void* x = nullptr;  // the input of the forward pass
  Strides x_strides = {};
  float* partial = nullptr;  // [parts, elements of a row]; null: the gradient of the weight is not requested
  void* grad_weight = nullptr;
};

// A row is the unit of normalization: one head, or all heads of a token. The normalized values are rounded to the
// dtype of q before they are rotated; with `rounded_before_weight` they are rounded before the weight, too. Tokens of
// the prefix and elements that are not rotated are normalized.
//
// Backward: `from` of the rotation's sides is the gradient of the result and `to` that of x. Gradients ignore the
// roundings.
struct NormRotation {
  Rotation rotation;  // by `table`, with first_rotated = 0
  SideNorm norms[kMaxSides];
  bool per_token;  // a row is all heads of a token, else one head
  bool rounded_before_weight;
  float eps, offset;
  int64_t parts = 0;  // of the two-stage reduction of the weights' gradients

  // Rows of a token of one side, and elements of a row.
  KIT_HOST_DEVICE int64_t rows_per_token(int side) const { return per_token ? 1 : rotation.sides[side].heads; }
  KIT_HOST_DEVICE int64_t heads_per_row(int side) const { return per_token ? rotation.sides[side].heads : 1; }
  KIT_HOST_DEVICE int64_t row_elements(int side) const { return heads_per_row(side) * rotation.width; }
};

}  // namespace rope3d
