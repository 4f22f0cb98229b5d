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
constexpr int kAxes = 3;

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

// An axis of a grid.
struct Axis {
  int64_t size;   // positions on it
  int64_t begin;  // its first pair, where the axes follow one another
  int64_t first;  // the pair of the first entry in its rows: `begin`, or a little less, a multiple of kAlignedPairs
};

// The first entry in a row of a grid's table belongs to a pair that is a multiple of this, so that entries are read in
// vectors.
constexpr int kAlignedPairs = 8;

// The cosines and sines of a grid, the last axis of which runs fastest: float32 [rows, entries, 2], one row for each
// position of the first axis, then of the second, then of the third, 16-byte aligned. Axes that follow one another:
// the entries of a row are those of the pairs from `first` on, zero for pairs of other axes. Axes in turn: pair p is
// entry p / kAxes of axis p % kAxes.
struct Grid {
  const float* table = nullptr;  // null: there is no grid
  int64_t entries = 0;           // even
  bool in_turn = false;
  Axis axes[kAxes] = {};
};

// The cosines and sines of tokens: a row for each, an entry for each pair.
struct Tokens {
  const void* cos = nullptr;
  const void* sin = nullptr;
  Type type = Type::float32;
  int64_t batch_stride = 0, row_stride = 0, pair_stride = 0;
};

// (a, b) -> (a * cos - b * sin, a * sin + b * cos) for every pair of every head.
struct Rotation {
  int64_t batch, tokens;
  int64_t prefix;         // the first tokens of each sequence, which stay as they are
  int64_t width;          // elements of a head, even
  int64_t pairs;          // of a head that turn, over all axes; the elements of the others stay as they are
  int64_t first_turning;  // element of a head: 0, or, so that what stays is in front, width - 2 * pairs
  Type type;              // of both sides
  Side sides[kMaxSides];
  Grid grid;
  Tokens table;
  bool half;     // pair p is the elements p and p + pairs of what turns; else 2 p and 2 p + 1
  bool inverse;  // by the negative angles

  KIT_HOST_DEVICE int64_t staying() const { return width - 2 * pairs; }
  KIT_HOST_DEVICE int64_t first_staying() const { return first_turning > 0 ? 0 : 2 * pairs; }
};

}  // namespace rope3d
