// Rotary embedding on the CPU.
//
// Reads:    the tokens, each element once, and the tables of cosines and sines.
// Writes:   the rotated tokens.
// Must not: start threads, allocate, or keep state between calls.
//
// The cosines and sines of a token are gathered once and used for all heads of q and k. On an axis where the next token
// has the same position, they are not gathered again. Iterations of a loop never access the same element, so the loops
// vectorize in place, too.
#include "rope3d_cpu/rope3d.h"

#include <algorithm>
#include <cstring>

#include "kit/cpu.h"

namespace rope3d {
namespace {

using namespace kit;

constexpr int64_t kMaxPairs = 1024;  // whose cosines and sines are gathered at a time

// Cosines and sines of the pairs `begin` to `end`, at most kMaxPairs.
struct Angles {
  int64_t begin, end;
  float sign;  // factor of the sines
  float cos[kMaxPairs], sin[kMaxPairs];
};

// Gathers the entries of one axis from a row of the grid's table.
inline void gather_axis(const Grid& grid, int axis, int64_t row, int64_t pairs, Angles& angles) {
  const float* entries = grid.table + 2 * row * grid.entries;
  const int64_t begin = angles.begin, end = angles.end;
  const float sign = angles.sign;
  if (grid.interleaved_axes) {
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
inline void gather_token(const Tokens& table, int64_t row, Angles& angles) {
  const auto* cos = static_cast<const typename E::Storage*>(table.cos) + row;
  const auto* sin = static_cast<const typename E::Storage*>(table.sin) + row;
  for (int64_t i = angles.begin; i < angles.end; ++i) {
    angles.cos[i - angles.begin] = E::decode(cos[i * table.pair_stride]);
    angles.sin[i - angles.begin] = E::decode(sin[i * table.pair_stride]) * angles.sign;
  }
}

inline void gather_token(const Tokens& table, int64_t row, Angles& angles) {
  switch (table.type) {
    case Type::float32:
      return gather_token<Float32>(table, row, angles);
    case Type::float16:
      return gather_token<Float16>(table, row, angles);
    case Type::bfloat16:
      return gather_token<BFloat16>(table, row, angles);
  }
}

// Rotates `count` pairs. Interleaved: the two elements of a pair are adjacent. Split: the second elements are
// `distance` after the first.
template <class T>
using RotatePairs = void (*)(const float* cos, const float* sin, int64_t count, const typename T::Storage* from,
                             typename T::Storage* to, int64_t distance);

// Returns a * b + c, rounded once if every CPU of the platform can: on aarch64. AVX2 code below does so, too.
INLINE float multiply_add(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

template <class T>
INLINE void rotate_split(const float* cos, const float* sin, int64_t count, const typename T::Storage* from,
                         typename T::Storage* to, int64_t distance) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float first = T::decode(from[i]), second = T::decode(from[i + distance]);
    to[i] = T::encode(multiply_add(first, cos[i], -(second * sin[i])));
    to[i + distance] = T::encode(multiply_add(second, cos[i], first * sin[i]));
  }
}

template <class T>
INLINE void rotate_interleaved(const float* cos, const float* sin, int64_t count, const typename T::Storage* from,
                               typename T::Storage* to, int64_t) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float first = T::decode(from[2 * i]), second = T::decode(from[2 * i + 1]);
    to[2 * i] = T::encode(multiply_add(first, cos[i], -(second * sin[i])));
    to[2 * i + 1] = T::encode(multiply_add(second, cos[i], first * sin[i]));
  }
}

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2,fma,f16c")))

// Loads and stores eight elements as floats.
template <class T>
struct Eight;

template <>
struct Eight<Float32> {
  static AVX2 INLINE __m256 load(const float* from) { return _mm256_loadu_ps(from); }
  static AVX2 INLINE void store(float* to, __m256 values) { _mm256_storeu_ps(to, values); }
};

template <>
struct Eight<Float16> {
  static AVX2 INLINE __m256 load(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static AVX2 INLINE void store(uint16_t* to, __m256 values) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  }
};

template <>
struct Eight<BFloat16> {
  static AVX2 INLINE __m256 load(const uint16_t* from) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  }
  static AVX2 INLINE void store(uint16_t* to, __m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i lowest_kept = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), lowest_kept);
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i shifted = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, nan, unordered), 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(shifted), _mm256_extracti128_si256(shifted, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
  }
};

// Explicit AVX2 versions with scalar loops for the tail: compilers vectorize neither the 16-bit conversions nor the
// swap within a pair.

template <class T>
AVX2 void rotate_split_avx2(const float* cos, const float* sin, int64_t count, const typename T::Storage* from,
                            typename T::Storage* to, int64_t distance) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 first = Eight<T>::load(from + i), second = Eight<T>::load(from + i + distance);
    const __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + i);
    Eight<T>::store(to + i, _mm256_fmsub_ps(first, c, _mm256_mul_ps(second, s)));
    Eight<T>::store(to + i + distance, _mm256_fmadd_ps(second, c, _mm256_mul_ps(first, s)));
  }
  rotate_split<T>(cos + i, sin + i, count - i, from + i, to + i, distance);
}

template <class T>
AVX2 void rotate_interleaved_avx2(const float* cos, const float* sin, int64_t count, const typename T::Storage* from,
                                  typename T::Storage* to, int64_t distance) {
  const __m256i duplicate = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const __m256 pairs = Eight<T>::load(from + 2 * i);
    const __m256 c = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(cos + i)), duplicate);
    const __m256 s = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(sin + i)), duplicate);
    const __m256 swapped = _mm256_permute_ps(pairs, 0xb1);
    Eight<T>::store(to + 2 * i, _mm256_fmaddsub_ps(pairs, c, _mm256_mul_ps(swapped, s)));
  }
  rotate_interleaved<T>(cos + i, sin + i, count - i, from + 2 * i, to + 2 * i, distance);
}

#endif

// Selects the implementation for the instruction set of this CPU.
template <class T>
RotatePairs<T> select_rotate_pairs(bool half) {
#if defined(__x86_64__)
  if (has_avx2()) return half ? rotate_split_avx2<T> : rotate_interleaved_avx2<T>;
#endif
  return half ? rotate_split<T> : rotate_interleaved<T>;
}

inline int64_t offset(const Strides& strides, int64_t sequence, int64_t token) {
  return sequence * strides.batch + token * strides.token;
}

// Calls `head(from, to)` for every head of a token.
template <class T, class Head>
INLINE void for_each_head(const Rotation& problem, int64_t sequence, int64_t token, Head head) {
  for (const Side& side : problem.sides) {
    const auto* from = static_cast<const typename T::Storage*>(side.from) + offset(side.from_strides, sequence, token);
    auto* to = static_cast<typename T::Storage*>(side.to) + offset(side.to_strides, sequence, token);
    for (int64_t i = 0; i < side.heads; ++i) {
      head(from + i * side.from_strides.head, to + i * side.to_strides.head);
    }
  }
}

// Copies `count` elements of every head of a token. In place there is nothing to copy.
template <class T>
INLINE void copy_elements(const Rotation& problem, int64_t sequence, int64_t token, int64_t first, int64_t count) {
  using Storage = typename T::Storage;
  for_each_head<T>(problem, sequence, token, [&](const Storage* from, Storage* to) {
    if (from != to) std::memcpy(to + first, from + first, count * sizeof(Storage));
  });
}

template <class T>
void rotate_tokens(const Rotation& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const Grid& grid = problem.grid;
  const RotatePairs<T> rotate_pairs = select_rotate_pairs<T>(problem.half);
  Angles angles;
  angles.sign = problem.inverse ? -1.0f : 1.0f;
  for (angles.begin = 0; angles.begin == 0 || angles.begin < problem.pairs; angles.begin += kMaxPairs) {
    angles.end = std::min(angles.begin + kMaxPairs, problem.pairs);
    int64_t gathered[kAxes] = {-1, -1, -1};
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sequence = i / problem.tokens, token = i % problem.tokens;
      const bool is_prefix = token < problem.prefix;
      if (angles.begin == 0 && is_prefix) copy_elements<T>(problem, sequence, token, 0, problem.width);
      if (is_prefix) continue;
      if (angles.begin == 0 && problem.passthrough() > 0) {
        copy_elements<T>(problem, sequence, token, problem.first_passthrough(), problem.passthrough());
      }
      if (grid.table != nullptr) {
        int64_t rest = token - problem.prefix, first_row = 0;
        int64_t positions[kAxes];
        for (int axis = kAxes - 1; axis >= 0; --axis) {
          positions[axis] = rest % grid.axes[axis].size;
          rest /= grid.axes[axis].size;
        }
        for (int axis = 0; axis < kAxes; ++axis) {
          const int64_t row = first_row + positions[axis];
          if (row != gathered[axis]) gather_axis(grid, axis, row, problem.pairs, angles);
          gathered[axis] = row;
          first_row += grid.axes[axis].size;
        }
      } else {
        const Tokens& table = problem.table;
        gather_token(table, sequence * table.batch_stride + (token - problem.prefix) * table.row_stride, angles);
      }
      const int64_t count = angles.end - angles.begin;
      const int64_t first = problem.first_rotated + (problem.half ? angles.begin : 2 * angles.begin);
      for_each_head<T>(problem, sequence, token, [&](const Storage* from, Storage* to) {
        rotate_pairs(angles.cos, angles.sin, count, from + first, to + first, problem.pairs);
      });
    }
  }
}

}  // namespace

void rotate(const Rotation& problem, int64_t begin, int64_t end) {
  switch (problem.type) {
    case Type::float32:
      return rotate_tokens<Float32>(problem, begin, end);
    case Type::float16:
      return rotate_tokens<Float16>(problem, begin, end);
    case Type::bfloat16:
      return rotate_tokens<BFloat16>(problem, begin, end);
  }
}

}  // namespace rope3d
