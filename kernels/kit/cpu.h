// Elements on the CPU: conversion to and from float32 in loops that vectorize, and instruction set detection.
//
// Reads:    nothing of its own; the callers pass the addresses.
// Must not: depend on the operation of a kernel.
//
// Conversions are always inlined, because a kernel is compiled once per instruction set and selects one at run time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kit/rows.h"

#define INLINE inline __attribute__((always_inline))
// For lambdas: `target` applies per function, and one that is not inlined would run without vector instructions.
#define ALWAYS_INLINE __attribute__((always_inline))

namespace kit {

template <class To, class From>
INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// One struct per dtype: its storage type, and conversion to float32 and from it (round to nearest, ties to even).
// Branch-free, so that the loops around them vectorize.

struct Float32 {
  using Storage = float;
  static INLINE float decode(float value) { return value; }
  static INLINE float encode(float value) { return value; }
};

struct BFloat16 {
  using Storage = uint16_t;
  static INLINE float decode(uint16_t half) { return bit_cast<float>(static_cast<uint32_t>(half) << 16); }
  static INLINE uint16_t encode(float value) {
    const auto bits = bit_cast<uint32_t>(value);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const uint32_t nan = bits | 0x400000u;
    return static_cast<uint16_t>((value != value ? nan : rounded) >> 16);
  }
};

struct Float16 {
  using Storage = uint16_t;

#if defined(__aarch64__)
  // Every such CPU has instructions for both, which compilers emit for vectors too.
  static INLINE float decode(uint16_t half) { return bit_cast<__fp16>(half); }
  static INLINE uint16_t encode(float value) { return bit_cast<uint16_t>(static_cast<__fp16>(value)); }
#else
  static INLINE float decode(uint16_t half) {
    const uint32_t bits = half;
    // A product rescales the exponent; this also converts subnormals correctly.
    const auto magnitude = bit_cast<uint32_t>(bit_cast<float>((bits & 0x7fffu) << 13) * 0x1p112f);
    const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    return bit_cast<float>(magnitude | special | ((bits & 0x8000u) << 16));
  }

  static INLINE uint16_t encode(float value) {
    const auto bits = bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 aligns the last bit of a subnormal result with that of the float sum, so that the FPU rounds it.
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
    result = magnitude >= 0x47800000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? nan : result;
    return static_cast<uint16_t>(result | ((bits >> 16) & 0x8000u));
  }
#endif
};

#if defined(__x86_64__)
// Float16 with conversions of kLanes elements by instructions, which compilers do not emit for a loop. The functions
// that call them must be inlined into one with these targets. They are not `always_inline` themselves, because g++
// would refuse to inline them into a template that has no target, before that is inlined.
struct Float16x8 : Float16 {
  static constexpr int64_t kLanes = 8;
  __attribute__((target("avx2,f16c"))) static inline void decode_lanes(const uint16_t* from, float* to) {
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  __attribute__((target("avx2,f16c"))) static inline void encode_lanes(const float* from, uint16_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
  }
};

struct Float16x16 : Float16 {
  static constexpr int64_t kLanes = 16;
  __attribute__((target("avx512f"))) static inline void decode_lanes(const uint16_t* from, float* to) {
    _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
  }
  __attribute__((target("avx512f"))) static inline void encode_lanes(const float* from, uint16_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
  }
};

// The dtype in code for an instruction set: T, or float16 with conversions by its instructions.
template <class T>
using ForAvx2 = std::conditional_t<std::is_same_v<T, Float16>, Float16x8, T>;
template <class T>
using ForAvx512 = std::conditional_t<std::is_same_v<T, Float16>, Float16x16, T>;
#endif

// How many elements T converts at a time, by instructions; 1: one, in loops that vectorize.
template <class T, class = void>
constexpr int64_t kLanes = 1;
template <class T>
constexpr int64_t kLanes<T, std::void_t<decltype(T::kLanes)>> = T::kLanes;

// Converts elements to floats.
template <class T>
INLINE void decode_all(const typename T::Storage* from, int64_t count, float* __restrict__ values) {
  int64_t i = 0;
  if constexpr (kLanes<T> > 1) {
    for (; i + kLanes<T> <= count; i += kLanes<T>) T::decode_lanes(from + i, values + i);
  }
#pragma omp simd
  for (int64_t j = i; j < count; ++j) values[j] = T::decode(from[j]);
}

// Converts floats to elements.
template <class T>
INLINE void encode_all(const float* values, int64_t count, typename T::Storage* __restrict__ to) {
  int64_t i = 0;
  if constexpr (kLanes<T> > 1) {
    for (; i + kLanes<T> <= count; i += kLanes<T>) T::encode_lanes(values + i, to + i);
  }
#pragma omp simd
  for (int64_t j = i; j < count; ++j) to[j] = T::encode(values[j]);
}

// Rounds floats to T.
template <class T>
INLINE void round_all(float* values, int64_t count) {
  int64_t i = 0;
  if constexpr (kLanes<T> > 1) {
    for (; i + kLanes<T> <= count; i += kLanes<T>) {
      typename T::Storage rounded[kLanes<T>];
      T::encode_lanes(values + i, rounded);
      T::decode_lanes(rounded, values + i);
    }
  }
#pragma omp simd
  for (int64_t j = i; j < count; ++j) values[j] = T::decode(T::encode(values[j]));
}

// Loops that convert, compute and convert back work on blocks. A block is so small that its floats can stay in
// registers and the CPU loads the next blocks during its arithmetic; with blocks of 512 elements it waits for memory in
// between.
constexpr int64_t kBlockElements = 64;

using Block = float[kBlockElements];
using Floats = std::vector<float>;

// Calls `work` with the beginning and the length of each block. `work` must be always inlined: in all calls but the
// last the length is then a constant, and loops over the block need no tail. Needs -fno-tree-loop-distribute-patterns
// where elements are floats, or g++ calls memcpy for each block.
template <class Work>
INLINE void for_blocks(int64_t count, Work work) {
  int64_t start = 0;
  for (; start + kBlockElements <= count; start += kBlockElements) work(start, kBlockElements);
  if (start < count) work(start, count - start);
}

// Writes value(i), rounded, for `count` elements.
template <class T, class Value>
INLINE void write_values(typename T::Storage* to, int64_t count, Value&& value) {
  for_blocks(count, [&](int64_t start, int64_t length) ALWAYS_INLINE {
    Block values;
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) values[i] = value(start + i);
    encode_all<T>(values, length, to + start);
  });
}

// Returns the sum of term(i) of `count` elements. A float32 sum of more elements than a part would have a larger error
// than the rounding of a result, in the same direction for a whole row.
template <class Term>
INLINE double sum_of(int64_t count, Term&& term) {
  constexpr int64_t kPart = 512;
  double total = 0.0;
  for (int64_t start = 0; start < count; start += kPart) {
    const int64_t end = std::min(start + kPart, count);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < end; ++i) sum += term(i);
    total += static_cast<double>(sum);
  }
  return total;
}

// Adds the columns [begin, end) of `parts` rows of `width` floats into the first row, as a binary tree.
inline void add_parts(float* partial, int64_t parts, int64_t width, int64_t begin, int64_t end) {
  for (int64_t distance = 1; distance < parts; distance *= 2) {
    for (int64_t part = 0; part + distance < parts; part += 2 * distance) {
      float* __restrict__ sums = partial + part * width;
      const float* __restrict__ others = sums + distance * width;
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) sums[i] += others[i];
    }
  }
}

// The rows of one of several parts, whose numbers of rows differ by one at most.
struct Part {
  int64_t first, last;
};
inline Part part_of(int64_t rows, int64_t parts, int64_t part) {
  const int64_t share = rows / parts, longer = rows % parts, first = part * share + std::min(part, longer);
  return {first, first + share + (part < longer ? 1 : 0)};
}

// Reads and writes T or float32, as the dtype of a weight is. Writes nothing where `to` is null.
template <class T>
INLINE void read_as(Type type, const void* from, int64_t begin, int64_t count, float* values) {
  if (type == Type::float32) return decode_all<Float32>(static_cast<const float*>(from) + begin, count, values);
  decode_all<T>(static_cast<const typename T::Storage*>(from) + begin, count, values);
}
template <class T>
INLINE void write_as(Type type, const float* values, void* to, int64_t begin, int64_t count) {
  if (to == nullptr) return;
  if (type == Type::float32) return encode_all<Float32>(values, count, static_cast<float*>(to) + begin);
  encode_all<T>(values, count, static_cast<typename T::Storage*>(to) + begin);
}

// Returns the factors weight + offset, or ones without a weight.
template <class T>
INLINE Floats load_factors(const Parameter& weight, float offset, int64_t count) {
  Floats factors(count, 1.0f);
  if (weight.data == nullptr) return factors;
  read_as<T>(weight.type, weight.data, 0, count, factors.data());
  for (float& factor : factors) factor += offset;
  return factors;
}

// Returns 1 / sqrt(the mean of squares + eps).
INLINE float reciprocal_norm(double sum_of_squares, int64_t count, float eps) {
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares / static_cast<double>(count) + static_cast<double>(eps)));
}

template <class T>
INLINE const typename T::Storage* at(const Rows& rows, int64_t row) {
  return static_cast<const typename T::Storage*>(rows.data) + rows.offset(row);
}

// Row `row` of contiguous rows.
template <class T>
INLINE typename T::Storage* row_at(void* data, int64_t row, int64_t hidden) {
  return static_cast<typename T::Storage*>(data) + row * hidden;
}

#if defined(__x86_64__)

// Returns whether this CPU runs code for `target("avx2,fma,f16c")`.
inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

// Returns whether this CPU runs code for `target("avx512f,avx512bw,avx512dq,avx512vl")`.
inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

template <class T, class Work>
__attribute__((target("avx2,fma,f16c"))) void run_avx2(const Work& work) {
  work(T{});
}
template <class T, class Work>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void run_avx512(
    const Work& work) {
  work(T{});
}

#endif

template <class T, class Work>
void run_with_type(const Work& work) {
#if defined(__x86_64__)
  if (has_avx512()) return run_avx512<ForAvx512<T>>(work);
  if (has_avx2()) return run_avx2<ForAvx2<T>>(work);
#endif
  work(T{});
}

// Calls `work` with a value of the struct of a dtype.
template <class Work>
INLINE void with_type(Type type, const Work& work) {
  switch (type) {
    case Type::float32:
      return work(Float32{});
    case Type::float16:
      return work(Float16{});
    case Type::bfloat16:
      return work(BFloat16{});
  }
}

// The same, compiled for the instruction set of this CPU. `work` and the functions that it calls are always inlined.
template <class Work>
void run_on_cpu(Type type, const Work& work) {
  with_type(type, [&](auto dtype) { run_with_type<decltype(dtype)>(work); });
}

// Adds up the columns [begin, end) of partial sums, in place, and writes them.
inline void reduce_columns(Type type, float* partial, int64_t parts, int64_t width, int64_t begin, int64_t end,
                           void* to) {
  run_on_cpu(type, [&](auto dtype) ALWAYS_INLINE {
    using T = decltype(dtype);
    add_parts(partial, parts, width, begin, end);
    encode_all<T>(partial + begin, end - begin, static_cast<typename T::Storage*>(to) + begin);
  });
}

}  // namespace kit
