// What the kernels share: parameters and modulations of either type, and how many rows lie before them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "adaln/problem.h"
#include "kit/elements.cuh"
#include "kit/sums.cuh"

namespace adaln {

using namespace kit;

// What is of the type of the rows, T, or float32.
template <typename T, int kWidth>
__device__ __forceinline__ void load_either(const void* from, Type type, int64_t index, float (&values)[kWidth]) {
  if (sizeof(T) == sizeof(float) || type == Type::float32) {
    load_floats(static_cast<const float*>(from) + index, values);
  } else {
    const auto vector = load<T, kWidth>(static_cast<const T*>(from) + index);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = decode(vector.elements[i]);
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_either(void* to, Type type, int64_t index, const float (&values)[kWidth]) {
  if (sizeof(T) == sizeof(float) || type == Type::float32) {
    store_floats(static_cast<float*>(to) + index, values);
  } else {
    Vector<T, kWidth> vector;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector.elements[i] = encode<T>(values[i]);
    store(static_cast<T*>(to) + index, vector);
  }
}

// The elements from `column` on, or `otherwise` where there is no such tensor.
template <typename T, int kWidth>
__device__ __forceinline__ void load_parameter(const Parameter& parameter, int64_t column, float otherwise,
                                               float (&values)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = otherwise;
  if (parameter.data != nullptr) load_either<T, kWidth>(parameter.data, parameter.type, column, values);
}

// The same of the modulation of a span, or zeros.
template <typename T, int kWidth>
__device__ __forceinline__ void load_modulation(const Modulation& modulation, int64_t span, int64_t column,
                                                float (&values)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = 0.0f;
  if (modulation.rows.data == nullptr) return;
  load_either<T, kWidth>(modulation.rows.data, modulation.type, modulation.rows.offset(span) + column, values);
}

// What multiplies the normed elements from `column` on, and what is added to the product.
template <typename T, int kWidth, typename Problem>
__device__ __forceinline__ void load_affine(const Problem& problem, int64_t span, int64_t column,
                                            float (&factor)[kWidth], float (&offset)[kWidth]) {
  float weight[kWidth], bias[kWidth];
  load_modulation<T, kWidth>(problem.scale, span, column, factor);
  load_modulation<T, kWidth>(problem.shift, span, column, offset);
  load_parameter<T, kWidth>(problem.weight, column, 1.0f, weight);
  load_parameter<T, kWidth>(problem.bias, column, 0.0f, bias);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float scale = 1.0f + factor[i];
    factor[i] = weight[i] * scale;
    offset[i] = bias[i] * scale + offset[i];
  }
}

// How many whole spans lie before a row. A division of 64 bits takes a GPU several times as long as one of 32.
__device__ __forceinline__ int64_t span_of(int64_t row, int64_t span) {
  if (span == 1) return row;
  if (row <= 0xffffffffu && span <= 0xffffffffu) return static_cast<uint32_t>(row) / static_cast<uint32_t>(span);
  return row / span;
}

__device__ __forceinline__ float reciprocal_norm(float sum_of_squares, int64_t hidden, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(hidden) + eps);
}

// Of rows that registers do not hold: a block for each.
inline Shape long_shape(int64_t hidden, int width) {
  const int64_t threads = ((hidden + width - 1) / width + kWarp - 1) / kWarp * kWarp;
  return {static_cast<int>(std::min<int64_t>(threads, kLongBlock)), 1, 0};
}

inline int64_t bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }

inline bool aligned(const Modulation& modulation) { return kit::aligned(modulation.rows, bytes_of(modulation.type)); }
using kit::aligned;

}  // namespace adaln
