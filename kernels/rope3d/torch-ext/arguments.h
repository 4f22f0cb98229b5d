// The arguments that all ops share: q, k, their layout, and the tables of `apply_rotary`.
//
// Reads:    sizes, strides, dtypes and devices of the arguments.
// Writes:   only tensors that it allocates.
// Must not: compute; call anything of Torch newer than 2.10.
//
// In all ops q and k are [B, S, H, D], or [B, H, S, D] if `heads_first`. If `head_dim` is not 0 they are [B, S, H * D]
// with D = `head_dim`, or with one head if it is -1. The first `prefix` tokens of each sequence are not rotated. `half`
// is that of rope3d/problem.h.
#pragma once

#include <limits>
#include <string>
#include <utility>

#include "kit/tensors.h"
#include "rope3d/problem.h"

namespace rope3d {

using namespace kit;

struct Form {
  int64_t prefix, head_dim;
  bool half, heads_first;
};

struct Shape {
  int64_t batch, tokens, heads, width;
};

inline Shape shape_of(const Tensor& x, const char* argument, const Form& form) {
  const auto sizes = x.sizes();
  const size_t dims = form.head_dim == 0 ? 4 : 3;
  if (sizes.size() != dims) {
    fail(argument, "must have " + to_string(dims) + " dimensions, not " + to_string(sizes.size()));
  }
  Shape shape{sizes[0], sizes[1], 1, sizes[dims - 1]};
  if (dims == 4) {
    shape.heads = sizes[2];
    if (form.heads_first) std::swap(shape.heads, shape.tokens);
  } else if (form.head_dim > 0) {
    if (shape.width % form.head_dim != 0) {
      fail(argument, "must have a multiple of " + to_string(form.head_dim) + " elements in its last dimension");
    }
    shape.heads = shape.width / form.head_dim;
    shape.width = form.head_dim;
  }
  if (shape.width % 2 != 0) fail(argument, "must have an even number of elements in each head");
  if (shape.batch * shape.tokens > std::numeric_limits<int32_t>::max())
    fail(argument, "must have less than 2^31 tokens");
  if (shape.heads >= 1 << 15) fail(argument, "must have less than 2^15 heads");
  if (shape.heads * shape.width >= 1 << 23) fail(argument, "must have less than 2^23 elements in each token");
  return shape;
}

// The strides of heads of `width` elements.
inline Strides strides_of(const Tensor& x, const Form& form, int64_t width) {
  const auto strides = x.strides();
  if (form.head_dim != 0) return {strides[0], strides[1], width};
  return {strides[0], strides[form.heads_first ? 2 : 1], strides[form.heads_first ? 1 : 2]};
}

// Checks q and k. The caller adds the angles and the pointers.
inline Rotation rotation(const Tensor& q, const MaybeTensor& k, const Form& form, bool inverse) {
  check_backend(q, "q");
  Rotation problem{};
  problem.type = element_type(q, "q");
  const Shape shape = shape_of(q, "q", form);
  problem.sides[0].heads = shape.heads;
  if (k.has_value()) {
    check_dtype(*k, "k", q, "q");
    const Shape other = shape_of(*k, "k", form);
    if (other.batch != shape.batch || other.tokens != shape.tokens || other.width != shape.width) {
      fail("k", "must have as many sequences, tokens and elements in each head as q");
    }
    problem.sides[1].heads = other.heads;
  }
  problem.batch = shape.batch;
  problem.tokens = shape.tokens;
  problem.width = shape.width;
  if (form.prefix < 0) fail("prefix", "must not be negative");
  problem.prefix = form.prefix;
  problem.half = form.half;
  problem.inverse = inverse;
  return problem;
}

// Replaces `cos` and `sin` by contiguous copies if their strides differ.
inline Rotation by_tokens(const Tensor& q, const MaybeTensor& k, Tensor& cos, Tensor& sin, int64_t rotary_dim,
                          const Form& form, bool inverse) {
  Rotation problem = rotation(q, k, form, inverse);
  check_device(cos, "cos", q, "q");
  Tokens& table = problem.table;
  table.type = element_type(cos, "cos");
  check_like(sin, "sin", cos, "cos");
  if (!cos.strides().equals(sin.strides())) {
    cos = torch::stable::contiguous(cos);
    sin = torch::stable::contiguous(sin);
  }
  const auto sizes = cos.sizes(), strides = cos.strides();
  const size_t dims = sizes.size();
  if (dims != 2 && dims != 3) fail("cos", "must have two or three dimensions");
  if (dims == 3 && sizes[0] != 1 && sizes[0] != problem.batch) {
    fail("cos", "must be for one sequence or for " + to_string(problem.batch) + ", not " + to_string(sizes[0]));
  }
  const int64_t rotary = rotary_dim != 0 ? rotary_dim : problem.width, entries = sizes[dims - 1];
  if (rotary < 0 || rotary > problem.width || rotary % 2 != 0) {
    fail("rotary_dim", "must be even and from 0 to " + to_string(problem.width) + ", not " + to_string(rotary));
  }
  if (entries != rotary && 2 * entries != rotary) {
    fail("cos", "must have " + to_string(rotary) + " or " + to_string(rotary / 2) + " in its last dimension, not " +
                    to_string(entries));
  }
  if (sizes[dims - 2] + problem.prefix != problem.tokens) {
    fail("cos", "and prefix must have " + to_string(problem.tokens) + " tokens, as q has, not " +
                    to_string(sizes[dims - 2]) + " + " + to_string(problem.prefix));
  }
  problem.pairs = rotary / 2;
  table.cos = cos.const_data_ptr();
  table.sin = sin.const_data_ptr();
  table.batch_stride = dims == 3 && sizes[0] > 1 ? strides[0] : 0;
  table.row_stride = strides[dims - 2];
  table.pair_stride = strides[dims - 1];
  if (entries == rotary) {
    table.second = table.pair_stride * (problem.half ? problem.pairs : 1);
    if (!problem.half) table.pair_stride *= 2;
  }
  return problem;
}

// Allocates the contiguous result for x, and makes it the target of `side`. Replaces x by a contiguous copy if the
// elements of its heads are not adjacent.
inline Tensor result_for(Tensor& x, Side& side, const Rotation& problem, const Form& form) {
  Tensor result = allocate_like(x);
  if (!adjacent(x)) x = torch::stable::contiguous(x);
  side.from = x.const_data_ptr();
  side.from_strides = strides_of(x, form, problem.width);
  side.to = result.mutable_data_ptr();
  side.to_strides = {problem.tokens * side.heads * problem.width, side.heads * problem.width, problem.width};
  if (form.heads_first) side.to_strides = {side.to_strides.batch, problem.width, problem.tokens * problem.width};
  return result;
}

}  // namespace rope3d
