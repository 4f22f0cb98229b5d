// Elements on the device: conversion to and from float32, and vectorized loads and stores.
//
// Reads:    nothing of its own; the callers pass the addresses.
// Must not: depend on the operation of a kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kit/platform.cuh"
#include "kit/rows.h"

// clang does not unroll loops that contain inline assembly, and warns at every such `#pragma unroll`.
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

namespace kit {

constexpr int kVectorBytes = 16;

template <typename T>
constexpr Type kTypeOf = std::is_same_v<T, float>    ? Type::float32
                         : std::is_same_v<T, __half> ? Type::float16
                                                     : Type::bfloat16;

// The type of one load or store.
template <size_t kBytes>
struct Word {
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  using Scalar = std::conditional_t<kBytes == 2, uint16_t, uint32_t>;
  using Type = std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, Scalar>>;
};

// clang returns a structure element by element: it splits a vector of 16-bit elements where it is loaded, and after a
// condition each load is waited for before the next one is issued. It returns a union as its most aligned member,
// `word`.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
#if defined(__clang__)
  union {
    T elements[kWidth];
    typename Word<sizeof(T) * kWidth>::Type word;
  };
#else
  T elements[kWidth];
#endif
};

__device__ __forceinline__ float decode(float value) { return value; }
__device__ __forceinline__ float decode(__half value) { return __half2float(value); }
__device__ __forceinline__ float decode(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T encode(float value);
template <>
__device__ __forceinline__ float encode<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half encode<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 encode<__nv_bfloat16>(float value) {
  return __float2bfloat16(value);
}

// Returns element i of a vector. 16-bit elements are read as parts of words: otherwise nvcc takes two instructions for
// the upper bfloat16 of a word, and clang keeps each element in a register and splits and joins words around it.
template <typename T, int kWidth>
__device__ __forceinline__ float decode(const Vector<T, kWidth>& vector, int i) {
  if constexpr (sizeof(T) == 2 && kWidth % 2 == 0) {
    uint32_t pair;
    memcpy(&pair, &vector.elements[i / 2 * 2], sizeof(pair));
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    } else {
      const auto bits = static_cast<uint16_t>(i % 2 == 0 ? pair : pair >> 16);
      return decode(__ushort_as_half(bits));
    }
  }
  return decode(vector.elements[i]);
}

// Pairs of 16-bit elements.
template <typename T>
using PairOf = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

__device__ __forceinline__ float2 decode(__half2 pair) { return __half22float2(pair); }
__device__ __forceinline__ float2 decode(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }

template <typename Pair>
__device__ __forceinline__ Pair encode_pair(float2 pair) {
  if constexpr (std::is_same_v<Pair, __half2>) {
    return __floats2half2_rn(pair.x, pair.y);
  } else {
    return __float22bfloat162_rn(pair);
  }
}

// Rounds all elements, 16-bit ones in pairs: that is one instruction per pair.
template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> encode_all(const float (&values)[kWidth]) {
  Vector<T, kWidth> vector;
  if constexpr (kWidth % 2 != 0 || sizeof(T) != 2) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector.elements[i] = encode<T>(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const auto pair = encode_pair<PairOf<T>>(make_float2(values[i], values[i + 1]));
      memcpy(&vector.elements[i], &pair, sizeof(pair));
    }
  }
  return vector;
}

// Hides the value of a vector of 16-bit elements from the compiler. Otherwise it keeps the decoded elements from one
// use to the next, in twice the registers, which costs more than decoding them again.
template <typename T, int kWidth>
__device__ __forceinline__ void make_opaque(Vector<T, kWidth>& vector) {
  if constexpr (sizeof(vector) >= 8 && sizeof(T) < sizeof(float)) {
    typename Word<sizeof(vector)>::Type word;
    memcpy(&word, &vector, sizeof(word));
    hide(word);
    memcpy(&vector, &word, sizeof(word));
  }
}

// Stores of a word: nvcc's __stwb, which clang lacks, and streaming stores, of lines that L2 evicts first, so that
// results do not displace inputs.
#if defined(USE_ROCM)
#define STORE_WORD(name, instruction)                         \
  template <typename Word>                                    \
  __device__ __forceinline__ void name(Word* to, Word word) { \
    *to = word;                                               \
  }
#else
#define STORE_WORD(name, instruction)                                                                            \
  __device__ __forceinline__ void name(uint16_t* to, uint16_t word) {                                            \
    asm volatile(instruction ".u16 [%0], %1;" ::"l"(to), "h"(word) : "memory");                                  \
  }                                                                                                              \
  __device__ __forceinline__ void name(uint32_t* to, uint32_t word) {                                            \
    asm volatile(instruction ".u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");                                  \
  }                                                                                                              \
  __device__ __forceinline__ void name(uint2* to, uint2 word) {                                                  \
    asm volatile(instruction ".v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(word.x), "r"(word.y) : "memory");          \
  }                                                                                                              \
  __device__ __forceinline__ void name(uint4* to, uint4 word) {                                                  \
    asm volatile(instruction ".v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x), "r"(word.y), "r"(word.z), \
                 "r"(word.w)                                                                                     \
                 : "memory");                                                                                    \
  }
#endif
STORE_WORD(store_word, "st.global.wb")
STORE_WORD(store_word_streaming, "st.global.cs")

// Loads and stores move a vector as one word. With a plain assignment nvcc sometimes stores element by element.
template <typename T, int kWidth>
__device__ __forceinline__ Vector<T, kWidth> load(const T* from) {
  using Whole = typename Word<sizeof(T) * kWidth>::Type;
  const Whole whole = *reinterpret_cast<const Whole*>(from);
  Vector<T, kWidth> vector;
  memcpy(&vector, &whole, sizeof(whole));
  return vector;
}

template <typename T, int kWidth>
__device__ __forceinline__ void store(T* to, const Vector<T, kWidth>& vector) {
  using Whole = typename Word<sizeof(T) * kWidth>::Type;
  Whole whole;
  memcpy(&whole, &vector, sizeof(whole));
  store_word(reinterpret_cast<Whole*>(to), whole);
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_streaming(T* to, const Vector<T, kWidth>& vector) {
  using Whole = typename Word<sizeof(T) * kWidth>::Type;
  Whole whole;
  memcpy(&whole, &vector, sizeof(whole));
  store_word_streaming(reinterpret_cast<Whole*>(to), whole);
}

// Returns an offset unchanged. clang computes the addresses that a loop does not change before it, and keeps them in
// registers or spills them. Those of this result are computed in the loop, as nvcc does.
__device__ __forceinline__ int computed_here(int offset) {
#if defined(__clang__)
  hide(offset);
#endif
  return offset;
}

// Products and sums that are not fused with the following operations, of float32 or of pairs of 16-bit elements, which
// are rounded once. In float32, products of two such elements are exact.
#if defined(USE_ROCM)
__device__ __forceinline__ float rounded_product(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
template <typename Pair>
__device__ __forceinline__ Pair rounded_product(Pair a, Pair b) {
  return encode_pair<Pair>(make_float2(decode(a).x * decode(b).x, decode(a).y * decode(b).y));
}
template <typename Pair>
__device__ __forceinline__ Pair rounded_sum(Pair a, Pair b) {
  return encode_pair<Pair>(make_float2(decode(a).x + decode(b).x, decode(a).y + decode(b).y));
}
#else
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
template <typename Pair>
__device__ __forceinline__ Pair rounded_product(Pair a, Pair b) {
  return __hmul2_rn(a, b);
}
template <typename Pair>
__device__ __forceinline__ Pair rounded_sum(Pair a, Pair b) {
  return __hadd2_rn(a, b);
}
#endif

// Elements whose dtype is known at run time only.
__device__ __forceinline__ float load_as(Type type, const void* data, int64_t index) {
  if (type == Type::float32) return static_cast<const float*>(data)[index];
  if (type == Type::float16) return decode(static_cast<const __half*>(data)[index]);
  return decode(static_cast<const __nv_bfloat16*>(data)[index]);
}
__device__ __forceinline__ void store_as(Type type, void* data, int64_t index, float value) {
  if (type == Type::float32) {
    static_cast<float*>(data)[index] = value;
  } else if (type == Type::float16) {
    static_cast<__half*>(data)[index] = encode<__half>(value);
  } else {
    static_cast<__nv_bfloat16*>(data)[index] = encode<__nv_bfloat16>(value);
  }
}
__device__ __forceinline__ float rounded_as(Type type, float value) {
  if (type == Type::float32) return value;
  return type == Type::float16 ? decode(encode<__half>(value)) : decode(encode<__nv_bfloat16>(value));
}

// Floats in one load or store: at most 16 bytes. A vector of 16-bit elements becomes several vectors of floats.
template <int kWidth>
constexpr int kFloats = kWidth < 4 ? kWidth : 4;

template <int kWidth>
__device__ __forceinline__ void load_floats(const float* from, float (&values)[kWidth]) {
#pragma unroll
  for (int start = 0; start < kWidth; start += kFloats<kWidth>) {
    const auto vector = load<float, kFloats<kWidth>>(from + start);
#pragma unroll
    for (int i = 0; i < kFloats<kWidth>; ++i) values[start + i] = vector.elements[i];
  }
}

template <int kWidth>
__device__ __forceinline__ void store_floats(float* to, const float (&values)[kWidth]) {
#pragma unroll
  for (int start = 0; start < kWidth; start += kFloats<kWidth>) {
    Vector<float, kFloats<kWidth>> vector;
#pragma unroll
    for (int i = 0; i < kFloats<kWidth>; ++i) vector.elements[i] = values[start + i];
    store(to + start, vector);
  }
}

inline bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; }

// Returns whether every row is 16-byte aligned. True if the tensor is absent.
inline bool aligned(const Rows& rows, int64_t element) {
  bool all = aligned(rows.data);
  for (int dim = 0; dim < rows.dims; ++dim) all = all && rows.strides[dim] * element % kVectorBytes == 0;
  return all;
}

}  // namespace kit
