// The rotation of a head's pairs, and the cosines and sines of a token, on the CPU.
//
// Reads:    tables with a row per token.
// Must not: depend on the operation of a kernel.
//
// Everything is always inlined, because the callers are compiled once per instruction set.
#pragma once

#include <vector>

#include "kit/cpu.h"
#include "rope3d/problem.h"

namespace rope3d {

using namespace kit;

// Returns a * b + c, rounded once if every CPU of the platform can: on aarch64.
INLINE float multiply_add(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The cosines and sines of a token: one per pair, or those of the first elements and then those of the second ones.
struct Angles {
  int64_t second;  // the index of the first entry of the second elements
  std::vector<float> cos, sin;

  INLINE explicit Angles(const Rotation& rotation)
      : second(rotation.table.second == 0 ? 0 : rotation.pairs), cos(rotation.pairs + second), sin(cos.size()) {}
};

// Rotates the first `pairs` pairs of `values` in place.
INLINE void rotate_pairs(const Angles& angles, int64_t pairs, bool half, float* __restrict__ values) {
  const float *cos_a = angles.cos.data(), *cos_b = cos_a + angles.second;
  const float *sin_a = angles.sin.data(), *sin_b = sin_a + angles.second;
  if (half) {
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) {
      const float a = values[i], b = values[i + pairs];
      values[i] = multiply_add(a, cos_a[i], -(b * sin_a[i]));
      values[i + pairs] = multiply_add(b, cos_b[i], a * sin_b[i]);
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) {
      const float a = values[2 * i], b = values[2 * i + 1];
      values[2 * i] = multiply_add(a, cos_a[i], -(b * sin_a[i]));
      values[2 * i + 1] = multiply_add(b, cos_b[i], a * sin_b[i]);
    }
  }
}

// Gathers the cosines and sines of a token after the prefix.
INLINE void gather_angles(const Rotation& rotation, int64_t sequence, int64_t token, Angles& angles) {
  const Tokens& table = rotation.table;
  const auto gather = [&](const void* entries, int64_t first, float factor, float* to) ALWAYS_INLINE {
    with_type(table.type, [=, &table](auto entry) ALWAYS_INLINE {
      using Entry = decltype(entry);
      const auto* from = static_cast<const typename Entry::Storage*>(entries) + first;
      for (int64_t i = 0; i < rotation.pairs; ++i) to[i] = Entry::decode(from[i * table.pair_stride]) * factor;
    });
  };
  const int64_t first = sequence * table.batch_stride + (token - rotation.prefix) * table.row_stride;
  for (int i = 0; i <= (table.second != 0); ++i) {
    // The transposed matrix has the negative sines of a pair in the other order.
    const int sine = rotation.inverse ? 1 - i : i;
    gather(table.cos, first + i * table.second, 1.0f, angles.cos.data() + i * angles.second);
    gather(table.sin, first + sine * table.second, rotation.inverse ? -1.0f : 1.0f,
           angles.sin.data() + i * angles.second);
  }
}

// The first element of a token.
INLINE int64_t token_offset(const Strides& strides, int64_t sequence, int64_t token) {
  return sequence * strides.batch + token * strides.token;
}

}  // namespace rope3d
