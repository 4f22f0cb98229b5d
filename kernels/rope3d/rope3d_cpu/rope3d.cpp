// Rotation on the CPU.
//
// Reads:    the tokens and the tables of a problem, each element of a token once.
// Writes:   the tokens.
// Must not: start threads, allocate, or keep anything between calls.
//
// The cosines and sines of a token are gathered once, and all heads of both sides turn by them; those of an axis on
// which the next token has the same position are left as they are. No two iterations of a loop touch the same element,
// also in place.
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
inline void gather_axis(const Grid& grid, int axis, int64_t row, int64_t pairs, Angles& angles) {
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

// Turns `count` pairs, by as many cosines and sines: those whose elements are adjacent, of which `from` is the first;
// or those whose second elements are `apart` from the first.
template <class T>
using Turn = void (*)(const float* cos, const float* sin, int64_t count, const typename T::Storage* from,
                      typename T::Storage* to, int64_t apart);

template <class T>
INLINE void turn_apart(const float* cos, const float* sin, int64_t count, const typename T::Storage* from,
                       typename T::Storage* to, int64_t apart) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float first = T::decode(from[i]), second = T::decode(from[i + apart]);
    to[i] = T::encode(first * cos[i] - second * sin[i]);
    to[i + apart] = T::encode(first * sin[i] + second * cos[i]);
  }
}

template <class T>
INLINE void turn_adjacent(const float* cos, const float* sin, int64_t count, const typename T::Storage* from,
                          typename T::Storage* to, int64_t) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float first = T::decode(from[2 * i]), second = T::decode(from[2 * i + 1]);
    to[2 * i] = T::encode(first * cos[i] - second * sin[i]);
    to[2 * i + 1] = T::encode(first * sin[i] + second * cos[i]);
  }
}

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2,fma,f16c")))

// Eight elements as floats.
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
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static AVX2 INLINE void store(uint16_t* to, __m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i halves = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, nan, unordered), 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
  }
};

// The same by vectors of eight, and what is left over by loops. The compiler finds neither the conversions nor the
// change of places within a pair.

template <class T>
AVX2 void turn_apart_avx2(const float* cos, const float* sin, int64_t count, const typename T::Storage* from,
                          typename T::Storage* to, int64_t apart) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 first = Eight<T>::load(from + i), second = Eight<T>::load(from + i + apart);
    const __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + i);
    Eight<T>::store(to + i, _mm256_fmsub_ps(first, c, _mm256_mul_ps(second, s)));
    Eight<T>::store(to + i + apart, _mm256_fmadd_ps(second, c, _mm256_mul_ps(first, s)));
  }
  turn_apart<T>(cos + i, sin + i, count - i, from + i, to + i, apart);
}

template <class T>
AVX2 void turn_adjacent_avx2(const float* cos, const float* sin, int64_t count, const typename T::Storage* from,
                             typename T::Storage* to, int64_t apart) {
  const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const __m256 pairs = Eight<T>::load(from + 2 * i);
    const __m256 c = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(cos + i)), twice);
    const __m256 s = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(sin + i)), twice);
    const __m256 swapped = _mm256_permute_ps(pairs, 0xb1);
    Eight<T>::store(to + 2 * i, _mm256_fmaddsub_ps(pairs, c, _mm256_mul_ps(swapped, s)));
  }
  turn_adjacent<T>(cos + i, sin + i, count - i, from + 2 * i, to + 2 * i, apart);
}

#endif

// Found out when it runs: that for the processor's instruction set.
template <class T>
Turn<T> turn_for(bool half) {
#if defined(__x86_64__)
  if (has_avx2()) return half ? turn_apart_avx2<T> : turn_adjacent_avx2<T>;
#endif
  return half ? turn_apart<T> : turn_adjacent<T>;
}

inline int64_t offset(const Strides& strides, int64_t sequence, int64_t token) {
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
void rotate_tokens(const Rotation& problem, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  const Grid& grid = problem.grid;
  const Turn<T> turn = turn_for<T>(problem.half);
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
      const int64_t count = angles.end - angles.begin;
      const int64_t at = problem.first_turning + (problem.half ? angles.begin : 2 * angles.begin);
      for_heads<T>(problem, sequence, token, [&](const Storage* from, Storage* to) {
        turn(angles.cos, angles.sin, count, from + at, to + at, problem.pairs);
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
