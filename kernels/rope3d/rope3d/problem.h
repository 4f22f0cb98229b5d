// The arguments of a kernel call in plain C++, so that device code is compiled without Torch and once for all versions.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// Strides and sizes are in elements; the elements of a head are contiguous. The arithmetic is float32, and each result
// is rounded once.
//
// Some elements of a head may not be rotated (partial rotary embeddings); they are copied.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace rope3d {

using kit::Type;

constexpr int kMaxSides = 2;  // q and k
constexpr int kAxes = 3;

struct Strides {
  int64_t batch, token, head;
};

// One of the tensors that are rotated by the same angles. In place: `from` is `to`, with equal strides.
struct Side {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t heads = 0;  // 0: there is no such tensor
  Strides from_strides = {}, to_strides = {};
};

// One axis of the token grid (frames, height or width).
struct Axis {
  int64_t size;   // positions
  int64_t begin;  // its first pair, if the axes own contiguous ranges of pairs
  int64_t first;  // pair of the first entry in its table rows: `begin` rounded down to a multiple of kAlignedPairs
};

// The first entry of a table row belongs to a pair that is a multiple of this, so that vectorized loads are aligned.
constexpr int kAlignedPairs = 8;

// Cosines and sines of a token grid, whose last axis runs fastest: float32 [rows, entries, 2], 16-byte aligned, with
// one row per position of the first axis, then of the second, then of the third. If the axes own contiguous ranges of
// pairs, the entries of a row belong to the pairs from `first` on and are zero for pairs of other axes. If the axes are
// interleaved, pair p is entry p / kAxes of axis p % kAxes.
struct Grid {
  const float* table = nullptr;  // null: there is no grid
  int64_t entries = 0;           // per row, even
  bool interleaved_axes = false;
  Axis axes[kAxes] = {};
};

// Cosines and sines per token: one row per token, with one entry per pair or one per element.
struct Tokens {
  const void* cos = nullptr;
  const void* sin = nullptr;
  Type type = Type::float32;
  int64_t batch_stride = 0, row_stride = 0, pair_stride = 0;
  int64_t second = 0;  // from the entry of a pair's first element to that of its second; 0: one entry per pair
};

// Maps every pair (a, b) of every head to (a * cos_a - b * sin_a, b * cos_b + a * sin_b), or by the transposed matrix
// to (a * cos_a + b * sin_b, b * cos_b - a * sin_a), as the backward pass does. With one cosine and one sine per pair
// these are rotations, the latter by the negative angle.
struct Rotation {
  int64_t batch, tokens;
  int64_t prefix;         // tokens at the start of each sequence that are not rotated
  int64_t width;          // elements of a head, even
  int64_t pairs;          // rotated pairs of a head, over all axes
  int64_t first_rotated;  // first rotated element of a head: 0, or width - 2 * pairs if the others come first
  Type type;              // of q and k
  Side sides[kMaxSides];
  Grid grid;
  Tokens table;
  bool half;     // pair p is the rotated elements p and p + pairs (half-split); else 2 p and 2 p + 1
  bool inverse;  // by the transposed matrix

  // Elements of a head that are not rotated: how many, and the first of them.
  KIT_HOST_DEVICE int64_t passthrough() const { return width - 2 * pairs; }
  KIT_HOST_DEVICE int64_t first_passthrough() const { return first_rotated > 0 ? 0 : 2 * pairs; }
};

// CUDA: launches on the current device, and returns a cudaError_t, 0 on success.
int run(const Rotation& problem, void* stream);

// The CPU: rotates the tokens `begin` to `end`, counted over all sequences. The caller divides them among threads.
void run(const Rotation& problem, int64_t begin, int64_t end);

// The RMSNorm of one of the tensors of a rotation. The factor of an element is its weight plus the offset.
struct SideNorm {
  kit::Parameter weight;  // contiguous, one entry per element of a row; without it all factors are 1

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
int run(const NormRotation& problem, void* stream);
int norm_rotate_backward(const NormRotation& problem, void* stream);

// The CPU: compute the tokens [begin, end) of all sequences, or the parts: the gradients of q and k, and the partial
// sums of the weights' gradients. The caller divides them among threads.
void run(const NormRotation& problem, int64_t begin, int64_t end);
void norm_rotate_backward(const NormRotation& problem, int64_t begin, int64_t end);

// The CPU: adds the partial sums of a side, and writes the elements [begin, end) of its weight's gradient.
void reduce_norm_weight(const NormRotation& problem, int side, int64_t begin, int64_t end);

// Sets the number of parts of a backward problem, whose pointers to tensors are set. Returns a cudaError_t, 0 on
// success.
int norm_partial_sums(const NormRotation& problem, int64_t* parts);

}  // namespace rope3d
