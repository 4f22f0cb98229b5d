// Rotation on the CPU.
//
// Reads:    the tokens and the tables of a problem, each element of a token once.
// Writes:   the tokens.
// Must not: start threads, allocate, or keep anything between calls.
//
// The cosines and sines of a token are gathered once, and all heads of both sides turn by them; those of an axis on
// which the next token has the same position are left as they are. The loops are plain, and `omp simd` lets the
// compiler vectorize them (-fopenmp-simd; there is no OpenMP runtime behind it): no two iterations touch the same
// element, also in place. They are compiled once for each instruction set, and which one runs is found out when it
// runs.
#include "rope3d_cpu/rope3d.h"

#include <algorithm>
#include <cstring>

#include "kit/cpu.h"

namespace rope3d {
namespace {

using namespace kit;

constexpr int64_t kChunk = 1024;  // pairs whose cosines and sines are held at a time

// Of the pairs from `begin` to `end`, at most kChunk.
struct Angles {
  int64_t begin, end;
  float sign;  // of the sines
  float cos[kChunk], sin[kChunk];
};

// Of one axis, whose row of the table is `row`.
INLINE void gather_axis(const Grid& grid, int axis, int64_t row, int64_t pairs, Angles& angles) {
  const float* entries = grid.table + 2 * row * grid.entries;
  const int64_t begin = angles.begin, end = angles.end;
  const float sign = angles.sign;
  if (grid.in_turn) {
    const int64_t first = (begin - axis + kAxes - 1) / kAxes, last = (end - axis + kAxes - 1) / kAxes;
    for (int64_t i = first; i < last; ++i) {
      angles.cos[i * kAxes + axis - begin] = entries[2 * i];
      angles.sin[i * kAxes + axis - begin] = entries[2 * i + 1] * sign;
    }
  } else {
    const int64_t first = std::max(begin, grid.axes[axis].begin);
    const int64_t last = std::min(end, axis + 1 < kAxes ? grid.axes[axis + 1].begin : pairs);
    entries -= 2 * grid.axes[axis].first;
    for (int64_t i = first; i < last; ++i) {
      angles.cos[i - begin] = entries[2 * i];
      angles.sin[i - begin] = entries[2 * i + 1] * sign;
    }
  }
}

template <class E>
INLINE void gather_token(const Tokens& table, int64_t row, Angles& angles) {
  const auto* cos = static_cast<const typename E::Storage*>(table.cos) + row;
  const auto* sin = static_cast<const typename E::Storage*>(table.sin) + row;
  for (int64_t i = angles.begin; i < angles.end; ++i) {
    angles.cos[i - angles.begin] = E::decode(cos[i * table.pair_stride]);
    angles.sin[i - angles.begin] = E::decode(sin[i * table.pair_stride]) * angles.sign;
  }
}

INLINE void gather_token(const Tokens& table, int64_t row, Angles& angles) {
  switch (table.type) {
    case Type::float32:
      return gather_token<Float32>(table, row, angles);
    case Type::float16:
      return gather_token<Float16>(table, row, angles);
    case Type::bfloat16:
      return gather_token<BFloat16>(table, row, angles);
  }
}

template <class T>
INLINE void turn_apart(const Angles& angles, const typename T::Storage* a, const typename T::Storage* b,
                       typename T::Storage* to_a, typename T::Storage* to_b) {
  const int64_t count = angles.end - angles.begin;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float first = T::decode(a[i]), second = T::decode(b[i]);
    to_a[i] = T::encode(first * angles.cos[i] - second * angles.sin[i]);
    to_b[i] = T::encode(first * angles.sin[i] + second * angles.cos[i]);
  }
}

template <class T>
INLINE void turn_adjacent(const Angles& angles, const typename T::Storage* from, typename T::Storage* to) {
  const int64_t count = angles.end - angles.begin;
  if constexpr (sizeof(typename T::Storage) == 2) {
    // A pair moves as one word, since the compiler would take vectors of halves apart and together again at some cost.
    using Pair __attribute__((may_alias, aligned(2))) = uint32_t;
    const auto* pairs = reinterpret_cast<const Pair*>(from);
    auto* to_pairs = reinterpret_cast<Pair*>(to);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t pair = pairs[i];
      const float first = T::decode(static_cast<uint16_t>(pair)), second = T::decode(static_cast<uint16_t>(pair >> 16));
      const uint32_t low = T::encode(first * angles.cos[i] - second * angles.sin[i]);
      const uint32_t high = T::encode(first * angles.sin[i] + second * angles.cos[i]);
      to_pairs[i] = low | high << 16;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float first = from[2 * i], second = from[2 * i + 1];
      to[2 * i] = first * angles.cos[i] - second * angles.sin[i];
      to[2 * i + 1] = first * angles.sin[i] + second * angles.cos[i];
    }
  }
}

// Turns the pairs of `angles` in one head.
template <class T>
INLINE void turn_head(const Rotation& problem, const Angles& angles, const typename T::Storage* from,
                      typename T::Storage* to) {
  if (problem.half) {
    const int64_t a = problem.first_turning + angles.begin, b = a + problem.pairs;
    turn_apart<T>(angles, from + a, from + b, to + a, to + b);
  } else {
    const int64_t a = problem.first_turning + 2 * angles.begin;
    turn_adjacent<T>(angles, from + a, to + a);
  }
}

#if defined(__x86_64__)

// Float16 by the processor's own conversions, which go over a block at a time.
struct ProcessorFloat16 : Float16 {};

template <>
INLINE void turn_head<ProcessorFloat16>(const Rotation& problem, const Angles& angles, const uint16_t* from,
                                        uint16_t* to) {
  const int64_t count = angles.end - angles.begin;
  float block[2 * kChunk];
  if (problem.half) {
    const int64_t a = problem.first_turning + angles.begin, b = a + problem.pairs;
    float *first = block, *second = block + count;
    float16_to_floats(from + a, first, count);
    float16_to_floats(from + b, second, count);
    turn_apart<Float32>(angles, first, second, first, second);
    floats_to_float16(first, to + a, count);
    floats_to_float16(second, to + b, count);
  } else {
    const int64_t a = problem.first_turning + 2 * angles.begin;
    float16_to_floats(from + a, block, 2 * count);
    turn_adjacent<Float32>(angles, block, block);
    floats_to_float16(block, to + a, 2 * count);
  }
}

#endif

INLINE int64_t offset(const Strides& strides, int64_t sequence, int64_t token) {
  return sequence * strides.batch + token * strides.token;
}

// Calls `head(from, to)` for every head of a token.
template <class T, class Head>
INLINE void for_heads(const Rotation& problem, int64_t sequence, int64_t token, Head head) {
  for (const Side& side : problem.sides) {
    const auto* from = static_cast<const typename T::Storage*>(side.from) + offset(side.from_strides, sequence, token);
    auto* to = static_cast<typename T::Storage*>(side.to) + offset(side.to_strides, sequence, token);
    for (int64_t i = 0; i < side.heads; ++i) {
      head(from + i * side.from_strides.head, to + i * side.to_strides.head);
    }
  }
}

// Elements of every head of a token, as they are. In place they are already there.
template <class T>
INLINE void copy(const Rotation& problem, int64_t sequence, int64_t token, int64_t first, int64_t count) {
  using Storage = typename T::Storage;
  for_heads<T>(problem, sequence, token, [&](const Storage* from, Storage* to) {
    if (from != to) std::memcpy(to + first, from + first, count * sizeof(Storage));
  });
}

template <class T>
INLINE void rotate_tokens(const Rotation& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const Grid& grid = problem.grid;
  Angles angles;
  angles.sign = problem.inverse ? -1.0f : 1.0f;
  for (angles.begin = 0; angles.begin == 0 || angles.begin < problem.pairs; angles.begin += kChunk) {
    angles.end = std::min(angles.begin + kChunk, problem.pairs);
    int64_t gathered[kAxes] = {-1, -1, -1};
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sequence = i / problem.tokens, token = i % problem.tokens;
      const bool stays = token < problem.prefix;
      if (angles.begin == 0 && stays) copy<T>(problem, sequence, token, 0, problem.width);
      if (stays) continue;
      if (angles.begin == 0 && problem.staying() > 0) {
        copy<T>(problem, sequence, token, problem.first_staying(), problem.staying());
      }
      if (grid.table != nullptr) {
        int64_t rest = token - problem.prefix, first_row = 0;
        int64_t places[kAxes];
        for (int axis = kAxes - 1; axis >= 0; --axis) {
          places[axis] = rest % grid.axes[axis].size;
          rest /= grid.axes[axis].size;
        }
        for (int axis = 0; axis < kAxes; ++axis) {
          const int64_t row = first_row + places[axis];
          if (row != gathered[axis]) gather_axis(grid, axis, row, problem.pairs, angles);
          gathered[axis] = row;
          first_row += grid.axes[axis].size;
        }
      } else {
        const Tokens& table = problem.table;
        gather_token(table, sequence * table.batch_stride + (token - problem.prefix) * table.row_stride, angles);
      }
      for_heads<T>(problem, sequence, token,
                   [&](const Storage* from, Storage* to) { turn_head<T>(problem, angles, from, to); });
    }
  }
}

#if defined(__x86_64__)
template <class T>
__attribute__((target("avx2,fma"))) void rotate_avx2(const Rotation& problem, int64_t begin, int64_t end) {
  rotate_tokens<T>(problem, begin, end);
}
#endif

template <class T, class Processor = T>
void run(const Rotation& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (has_avx2()) return rotate_avx2<Processor>(problem, begin, end);
#endif
  rotate_tokens<T>(problem, begin, end);
}

}  // namespace

void rotate(const Rotation& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return run<Float32>(problem, begin, end);
    case Type::float16:
#if defined(__x86_64__)
      return run<Float16, ProcessorFloat16>(problem, begin, end);
#else
      return run<Float16>(problem, begin, end);
#endif
    case Type::bfloat16:
      return run<BFloat16>(problem, begin, end);
  }
}

}  // namespace rope3d
