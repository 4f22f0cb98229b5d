// Vectors of elements: how they move between global memory, shared memory and registers, and how they are converted.
//
// Reads:    nothing by itself.
// Must not: depend on the operation of a kernel.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kit/async_copy.cuh"
#include "kit/elements.cuh"

namespace kit {

template <typename T>
constexpr int kVectorWidth = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
using VectorOf = Vector<T, kVectorWidth<T>>;

template <typename T>
__device__ __forceinline__ VectorOf<T> vector_of(uint4 word) {
  VectorOf<T> vector;
  memcpy(&vector, &word, sizeof(vector));
  return vector;
}

#if defined(USE_ROCM)

__device__ __forceinline__ uint4 load_word(const uint4* from) { return *from; }

// The second argument gives the type.
template <typename Word>
__device__ __forceinline__ Word load_shared(SharedAddress from, Word) {
  return *shared_pointer<const Word>(from);
}
template <typename Word>
__device__ __forceinline__ void store_shared(SharedAddress to, Word word) {
  *shared_pointer<Word>(to) = word;
}

#else

// Loads a vector. The memory clobber keeps it in program order; the compiler would move a plain load after asynchronous
// copies, which need no registers. Not with .nc: PTX's memory consistency model, and so the grid wait, leaves it out.
__device__ __forceinline__ uint4 load_word(const uint4* from) {
  uint4 word;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from)
               : "memory");
  return word;
}

// Shared memory by its 32-bit addresses.
__device__ __forceinline__ uint4 load_shared(SharedAddress from, uint4) {
  uint4 word;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "r"(from)
               : "memory");
  return word;
}
__device__ __forceinline__ uint2 load_shared(SharedAddress from, uint2) {
  uint2 word;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word.x), "=r"(word.y) : "r"(from) : "memory");
  return word;
}

__device__ __forceinline__ void store_shared(SharedAddress to, uint4 word) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(SharedAddress to, uint2 word) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(word.x), "r"(word.y) : "memory");
}
__device__ __forceinline__ void store_shared(SharedAddress to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

#endif

// Conversions to float32.
template <typename T, int kWidth>
__device__ __forceinline__ void decode_all(const T* elements, float (&values)[kWidth]) {
  Vector<T, kWidth> vector;
  memcpy(&vector, elements, sizeof(vector));
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = decode(vector, i);
}

// Reads a vector of T from shared memory.
template <typename T, int kWidth>
__device__ __forceinline__ void decode_shared(SharedAddress from, float (&values)[kWidth]) {
  const auto word = load_shared(from, typename Word<sizeof(T) * kWidth>::Type{});
  Vector<T, kWidth> vector;
  memcpy(&vector, &word, sizeof(word));
  decode_all(vector.elements, values);
}

// Vectors whose dtype is known at run time only: eight elements, in one 16-byte word or, as float32, in two.
constexpr int kDynamicWidth = 8;

struct DynamicType {
  bool is_float32;
  bool is_float16;  // neither: bfloat16

  __host__ __device__ int words() const { return is_float32 ? 2 : 1; }  // of a vector
  __host__ __device__ int element_bytes() const { return 2 * words(); }
};

inline DynamicType dynamic_type(Type type) { return {type == Type::float32, type == Type::float16}; }

__device__ __forceinline__ void decode_words(const uint4 (&words)[2], DynamicType type,
                                             float (&values)[kDynamicWidth]) {
  if (type.is_float32) {
    memcpy(values, words, sizeof(words));
  } else if (type.is_float16) {
    __half elements[kDynamicWidth];
    memcpy(elements, words, sizeof(elements));
    decode_all(elements, values);
  } else {
    __nv_bfloat16 elements[kDynamicWidth];
    memcpy(elements, words, sizeof(elements));
    decode_all(elements, values);
  }
}

__device__ __forceinline__ void encode_words(const float (&values)[kDynamicWidth], DynamicType type,
                                             uint4 (&words)[2]) {
  if (type.is_float32) {
    memcpy(words, values, sizeof(words));
  } else if (type.is_float16) {
    const auto vector = encode_all<__half>(values);
    memcpy(words, &vector, sizeof(vector));
  } else {
    const auto vector = encode_all<__nv_bfloat16>(values);
    memcpy(words, &vector, sizeof(vector));
  }
}

// Reads a vector from shared memory; the second word of float32 is `distance` bytes after the first.
__device__ __forceinline__ void read_shared(SharedAddress from, uint32_t distance, DynamicType type,
                                            float (&values)[kDynamicWidth]) {
  uint4 words[2]{load_shared(from, uint4{}), {}};
  if (type.is_float32) words[1] = load_shared(from + distance, uint4{});
  decode_words(words, type, values);
}

// Moves a vector from and to global memory, from element `index` on. Stores are streaming (evict-first).
__device__ __forceinline__ void load_words(const void* data, int64_t index, DynamicType type,
                                           float (&values)[kDynamicWidth]) {
  const auto* const from =
      reinterpret_cast<const uint4*>(static_cast<const char*>(data) + index * type.element_bytes());
  uint4 words[2]{load_word(from), {}};
  if (type.is_float32) words[1] = load_word(from + 1);
  decode_words(words, type, values);
}
__device__ __forceinline__ void store_words(void* data, int64_t index, DynamicType type,
                                            const float (&values)[kDynamicWidth]) {
  auto* const to = reinterpret_cast<uint4*>(static_cast<char*>(data) + index * type.element_bytes());
  uint4 words[2];
  encode_words(values, type, words);
  store_word_streaming(to, words[0]);
  if (type.is_float32) store_word_streaming(to + 1, words[1]);
}

// Rounds to T.
template <typename T, int kWidth>
__device__ __forceinline__ void round_to(float (&values)[kWidth]) {
  decode_all(encode_all<T, kWidth>(values).elements, values);
}

// sum += product * factor, fused, or with the product rounded to T when `stepwise`.
template <typename T, int kWidth>
__device__ __forceinline__ void add_gated(float (&product)[kWidth], const float (&factor)[kWidth], bool stepwise,
                                          float (&sum)[kWidth]) {
  if (stepwise && !std::is_same_v<T, float>) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) product[j] *= factor[j];
    round_to<T>(product);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] += product[j];
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] = fmaf(product[j], factor[j], sum[j]);
  }
}

// Vectors of T or of float32, as the dtype of a modulation or parameter is.
template <typename T, int kWidth>
__device__ __forceinline__ void load_mixed(const void* from, Type type, int64_t index, float (&values)[kWidth]) {
  if (sizeof(T) == sizeof(float) || type == Type::float32) {
    load_floats(static_cast<const float*>(from) + index, values);
  } else {
    decode_all(load<T, kWidth>(static_cast<const T*>(from) + index).elements, values);
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_mixed(void* to, Type type, int64_t index, const float (&values)[kWidth]) {
  if (sizeof(T) == sizeof(float) || type == Type::float32) {
    store_floats(static_cast<float*>(to) + index, values);
  } else {
    store(static_cast<T*>(to) + index, encode_all<T>(values));
  }
}

}  // namespace kit
