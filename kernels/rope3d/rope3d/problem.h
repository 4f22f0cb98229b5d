// What one call of the kernel works on, in plain C++, so that device code compiles without Torch and once for every
// Torch.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// Strides and sizes are counted in elements; the elements of a head are adjacent. The arithmetic is float32, and each
// result is rounded once.
#pragma once

#include <cstdint>

#include "kit/rows.h"

namespace rope3d {

using kit::Type;

constexpr int kMaxSides = 2;  // q and k
constexpr int kMaxAxes = 3;

struct Strides {
  int64_t batch, token, head;
};

// One of the tensors that turn by the same angles. In place: `from` is `to`, with equal strides.
struct Side {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t heads = 0;  // 0: there is no such tensor
  Strides from_strides = {}, to_strides = {};
};

// The cosines and sines of an axis: one row for each of its positions, one entry for each of its pairs.
struct Table {
  const void* cos = nullptr;
  const void* sin = nullptr;
  Type type = Type::float32;
  int64_t rows = 1, pairs = 0;
  int64_t batch_stride = 0, row_stride = 0, pair_stride = 0;
};

// (a, b) -> (a * cos - b * sin, a * sin + b * cos) for every pair of every head. A token's row in the table of an axis
// is its position on a grid whose last axis runs fastest; with one table, the token itself.
struct Rotation {
  int64_t batch, tokens;
  int64_t prefix;  // the first tokens of each sequence, which stay as they are
  int64_t width;   // elements of a head, even
  int64_t pairs;   // of a head that turn, over all axes; the elements of the others stay as they are
  Type type;       // of both sides
  Side sides[kMaxSides];
  int axes;  // 1 or kMaxAxes
  Table tables[kMaxAxes];
  bool in_turn;  // pair p belongs to axis p % axes, and what stays is in front; else the axes follow one another, and
                 // what stays is behind
  bool half;     // pair p is the elements p and p + pairs of what turns; else 2 p and 2 p + 1
  bool inverse;  // by the negative angles

  KIT_HOST_DEVICE int64_t staying() const { return width - 2 * pairs; }
  KIT_HOST_DEVICE int64_t first_turning() const { return in_turn ? staying() : 0; }
  KIT_HOST_DEVICE int64_t first_staying() const { return in_turn ? 0 : 2 * pairs; }
};

}  // namespace rope3d
