// What the kernels in both directions share: the weight, and the norm of a row from its sum.
#pragma once

#include <cstdint>

#include "kit/elements.cuh"
#include "rmsnorm/problem.h"

namespace rmsnorm {

using namespace kit;

// The factors of the elements from `column` on.
template <typename T, int kWidth>
__device__ __forceinline__ void load_weight(const Weight& weight, int64_t column, float (&factors)[kWidth]) {
  if (weight.data == nullptr) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factors[i] = 1.0f;
  } else if (sizeof(T) == sizeof(float) || weight.type != Type::float32) {
    const auto vector = load<T, kWidth>(static_cast<const T*>(weight.data) + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factors[i] = decode(vector.elements[i]);
  } else {
    load_floats(static_cast<const float*>(weight.data) + column, factors);
  }
}

__device__ __forceinline__ float reciprocal_norm(float sum_of_squares, int64_t hidden, float eps) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(hidden) + eps);
}

}  // namespace rmsnorm
