// Rotary embedding on the CPU.
//
// Reads:    the tokens, each element once, and the tables of cosines and sines.
// Writes:   the rotated tokens.
// Must not: start threads, or keep state between calls.
//
// The cosines and sines of a token are gathered once and used for all heads of q and k. On an axis where the next token
// has the same position, they are not gathered again. A head is converted to floats, rotated, and converted back, in
// loops that vectorize; they are compiled once per instruction set, and one is selected at run time.
#include <algorithm>
#include <cstring>
#include <vector>

#include "rope3d/problem.h"
#include "rope3d_cpu/rotate_pairs.h"

namespace rope3d {
namespace {

// The rows of a grid's table that were gathered.
struct GridRows {
  int64_t of_axis[kAxes] = {-1, -1, -1};
};

// Gathers the entries of one axis from a row of the grid's table.
INLINE void gather_axis(const Rotation& problem, int axis, int64_t row, Angles& angles) {
  const Grid& grid = problem.grid;
  const float* entries = grid.table + 2 * (row * grid.entries - (grid.interleaved_axes ? 0 : grid.axes[axis].first));
  const float sign = problem.inverse ? -1.0f : 1.0f;
  const auto gather = [&](int64_t pair, int64_t entry) ALWAYS_INLINE {
    angles.cos[pair] = entries[2 * entry];
    angles.sin[pair] = entries[2 * entry + 1] * sign;
  };
  if (grid.interleaved_axes) {
    for (int64_t pair = axis; pair < problem.pairs; pair += kAxes) gather(pair, pair / kAxes);
  } else {
    const int64_t end = axis + 1 < kAxes ? grid.axes[axis + 1].begin : problem.pairs;
    for (int64_t pair = grid.axes[axis].begin; pair < end; ++pair) gather(pair, pair);
  }
}

INLINE void gather_grid(const Rotation& problem, int64_t token, GridRows& rows, Angles& angles) {
  const Grid& grid = problem.grid;
  int64_t rest = token - problem.prefix, end = grid.axes[0].size + grid.axes[1].size + grid.axes[2].size;
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    const int64_t size = grid.axes[axis].size, row = (end -= size) + rest % size;
    rest /= size;
    if (row != rows.of_axis[axis]) gather_axis(problem, axis, row, angles);
    rows.of_axis[axis] = row;
  }
}

template <class T>
INLINE void rotate_tokens(const Rotation& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  GridRows rows;
  Angles angles(problem);
  std::vector<float> values(2 * problem.pairs);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t sequence = i / problem.tokens, token = i % problem.tokens;
    const bool rotated = token >= problem.prefix;
    if (rotated && problem.grid.table != nullptr) gather_grid(problem, token, rows, angles);
    if (rotated && problem.grid.table == nullptr) gather_angles(problem, sequence, token, angles);
    const int64_t copied = rotated ? problem.first_passthrough() : 0;
    const int64_t copies = rotated ? problem.passthrough() : problem.width;
    for (const Side& side : problem.sides) {
      const auto* from = static_cast<const Storage*>(side.from) + token_offset(side.from_strides, sequence, token);
      auto* to = static_cast<Storage*>(side.to) + token_offset(side.to_strides, sequence, token);
      for (int64_t head = 0; head < side.heads; ++head) {
        if (copies > 0 && from != to) std::memcpy(to + copied, from + copied, copies * sizeof(Storage));
        if (rotated) {
          decode_all<T>(from + problem.first_rotated, 2 * problem.pairs, values.data());
          rotate_pairs(angles, problem.pairs, problem.half, values.data());
          encode_all<T>(values.data(), 2 * problem.pairs, to + problem.first_rotated);
        }
        from += side.from_strides.head;
        to += side.to_strides.head;
      }
    }
  }
}

}  // namespace

void run(const Rotation& problem, int64_t begin, int64_t end) {
  run_on_cpu(problem.type, [&](auto type) ALWAYS_INLINE { rotate_tokens<decltype(type)>(problem, begin, end); });
}

}  // namespace rope3d
