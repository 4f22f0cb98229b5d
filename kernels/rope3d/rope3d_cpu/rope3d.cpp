// Rotation on the CPU.
//
// Reads:    the tokens and the tables of a problem, each element of a token once.
// Writes:   the tokens.
// Must not: start threads, allocate, or keep anything between calls.
//
// The cosines and sines of a token are gathered once, and all heads of both sides turn by them. The loops are plain,
// and `omp simd` lets the compiler vectorize them (-fopenmp-simd; there is no OpenMP runtime behind it): no two
// iterations touch the same element, also in place. They are compiled once for each instruction set, and which one runs
// is found out when it runs.
#include "rope3d_cpu/rope3d.h"

#include <algorithm>
#include <cstring>

#include "kit/cpu.h"

namespace rope3d {
namespace {

using namespace kit;

constexpr int64_t kChunk = 256;  // pairs whose cosines and sines are held at a time

struct Angles {
  float cos[kChunk], sin[kChunk];
};

template <class E>
INLINE void gather_axis(const Table& table, int64_t row, int64_t first, int64_t count, int64_t step, float sign,
                        float* cos, float* sin) {
  const auto* cosines = static_cast<const typename E::Storage*>(table.cos) + row;
  const auto* sines = static_cast<const typename E::Storage*>(table.sin) + row;
  for (int64_t i = 0; i < count; ++i) {
    cos[i * step] = E::decode(cosines[(first + i) * table.pair_stride]);
    sin[i * step] = E::decode(sines[(first + i) * table.pair_stride]) * sign;
  }
}

INLINE void gather_axis(const Table& table, int64_t row, int64_t first, int64_t count, int64_t step, float sign,
                        float* cos, float* sin) {
  switch (table.type) {
    case Type::float32:
      return gather_axis<Float32>(table, row, first, count, step, sign, cos, sin);
    case Type::float16:
      return gather_axis<Float16>(table, row, first, count, step, sign, cos, sin);
    case Type::bfloat16:
      return gather_axis<BFloat16>(table, row, first, count, step, sign, cos, sin);
  }
}

// The angles of the pairs from `begin` to `end` of a token, whose rows of the tables start at `rows`.
INLINE void gather(const Rotation& problem, const int64_t* rows, int64_t begin, int64_t end, Angles& angles) {
  const float sign = problem.inverse ? -1.0f : 1.0f;
  int64_t start = 0;  // of the axis, where the axes follow one another
  for (int axis = 0; axis < problem.axes; ++axis) {
    const Table& table = problem.tables[axis];
    if (problem.in_turn) {
      const int64_t axes = problem.axes;
      const int64_t first = (begin - axis + axes - 1) / axes, last = (end - axis + axes - 1) / axes;
      const int64_t at = first * axes + axis - begin;
      gather_axis(table, rows[axis], first, last - first, axes, sign, angles.cos + at, angles.sin + at);
    } else {
      const int64_t first = std::max(begin, start), last = std::min(end, start + table.pairs);
      if (first < last) {
        const int64_t at = first - begin;
        gather_axis(table, rows[axis], first - start, last - first, 1, sign, angles.cos + at, angles.sin + at);
      }
      start += table.pairs;
    }
  }
}

template <class T>
INLINE void turn_apart(const Angles& angles, int64_t count, const typename T::Storage* a, const typename T::Storage* b,
                       typename T::Storage* to_a, typename T::Storage* to_b) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float first = T::decode(a[i]), second = T::decode(b[i]);
    to_a[i] = T::encode(first * angles.cos[i] - second * angles.sin[i]);
    to_b[i] = T::encode(first * angles.sin[i] + second * angles.cos[i]);
  }
}

template <class T>
INLINE void turn_adjacent(const Angles& angles, int64_t count, const typename T::Storage* from,
                          typename T::Storage* to) {
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

INLINE int64_t offset(const Strides& strides, int64_t sequence, int64_t token, int64_t head) {
  return sequence * strides.batch + token * strides.token + head * strides.head;
}

template <class T>
INLINE void copy(const Rotation& problem, int64_t sequence, int64_t token, int64_t first, int64_t count) {
  using Storage = typename T::Storage;
  for (const Side& side : problem.sides) {
    if (side.from == side.to) continue;
    for (int64_t head = 0; head < side.heads; ++head) {
      const auto* from = static_cast<const Storage*>(side.from) + offset(side.from_strides, sequence, token, head);
      auto* to = static_cast<Storage*>(side.to) + offset(side.to_strides, sequence, token, head);
      std::memcpy(to + first, from + first, count * sizeof(Storage));
    }
  }
}

template <class T>
INLINE void rotate_tokens(const Rotation& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  Angles angles;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t sequence = i / problem.tokens, token = i % problem.tokens;
    if (token < problem.prefix) {
      copy<T>(problem, sequence, token, 0, problem.width);
      continue;
    }
    if (problem.staying() > 0) copy<T>(problem, sequence, token, problem.first_staying(), problem.staying());
    int64_t rows[kMaxAxes] = {};
    int64_t rest = token - problem.prefix;
    for (int axis = problem.axes - 1; axis >= 0; --axis) {
      const Table& table = problem.tables[axis];
      rows[axis] = sequence * table.batch_stride + rest % table.rows * table.row_stride;
      rest /= table.rows;
    }
    for (int64_t pair = 0; pair < problem.pairs; pair += kChunk) {
      const int64_t count = std::min(kChunk, problem.pairs - pair);
      gather(problem, rows, pair, pair + count, angles);
      const int64_t a = problem.first_turning() + (problem.half ? pair : 2 * pair);
      const int64_t b = a + problem.pairs;
      for (const Side& side : problem.sides) {
        for (int64_t head = 0; head < side.heads; ++head) {
          const auto* from = static_cast<const Storage*>(side.from) + offset(side.from_strides, sequence, token, head);
          auto* to = static_cast<Storage*>(side.to) + offset(side.to_strides, sequence, token, head);
          if (problem.half) {
            turn_apart<T>(angles, count, from + a, from + b, to + a, to + b);
          } else {
            turn_adjacent<T>(angles, count, from + a, to + a);
          }
        }
      }
    }
  }
}

#if defined(__x86_64__)
template <class T>
__attribute__((target("avx2,fma"))) void rotate_avx2(const Rotation& problem, int64_t begin, int64_t end) {
  rotate_tokens<T>(problem, begin, end);
}
#endif

template <class T>
void run(const Rotation& problem, int64_t begin, int64_t end) {
#if defined(__x86_64__)
  if (has_avx2()) return rotate_avx2<T>(problem, begin, end);
#endif
  rotate_tokens<T>(problem, begin, end);
}

}  // namespace

void rotate(const Rotation& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return run<Float32>(problem, begin, end);
    case Type::float16:
      return run<Float16>(problem, begin, end);
    case Type::bfloat16:
      return run<BFloat16>(problem, begin, end);
  }
}

}  // namespace rope3d
