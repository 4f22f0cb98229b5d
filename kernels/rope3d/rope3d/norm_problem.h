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

// CUDA: launch on the current device, and return a cudaError_t, 0 on success. The backward pass needs `parts` if a
// gradient of a weight is requested.
int norm_rotate(const NormRotation& problem, void* stream);
int norm_rotate_backward(const NormRotation& problem, void* stream);

// The CPU: compute the tokens [begin, end) of all sequences, or the parts: the gradients of q and k, and the partial
// sums of the weights' gradients. The caller divides them among threads.
void norm_rotate(const NormRotation& problem, int64_t begin, int64_t end);
void norm_rotate_backward(const NormRotation& problem, int64_t begin, int64_t end);

// The CPU: adds the partial sums of a side, and writes the elements [begin, end) of its weight's gradient.
void reduce_norm_weight(const NormRotation& problem, int side, int64_t begin, int64_t end);

// Sets the number of parts of a backward problem, whose pointers to tensors are set. Returns a cudaError_t, 0 on
// success.
int norm_partial_sums(const NormRotation& problem, int64_t* parts);

}  // namespace rope3d
