// ${computed}: the arguments of a call, and the arithmetic of all backends.
//
// Must not: include anything of Torch or CUDA.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kit/rows.h"

namespace op {

// The tensors are contiguous and have one dtype.
struct Problem {
  kit::Type type;
  int64_t elements;
  const void* x;
  const void* grad;  // null: the forward pass
  void* out;         // y, or the gradient with respect to x
};

#if defined(__CUDACC__)
KIT_HOST_DEVICE float exponential(float x) { return std::exp(x); }
#else
// e^x within 2e-7, in arithmetic that compilers vectorize, as they do not a call of std::exp: 2^n * e^r with
// |r| <= ln(2) / 2, and e^r by the polynomial of degree 6 with the least relative error, 4e-9. Results below the
// smallest normal number are not denormal but that number.
inline __attribute__((always_inline)) float exponential(float x) {
  constexpr float kMagic = 0x1.8p23f;  // adding it rounds to an integer, which then stands in the low bits
  x = x > 89.0f ? 89.0f : x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504f + kMagic;
  const float n = shifted - kMagic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 127u) << 23;  // the exponent n, infinity for n = 128
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  float series = 0.00138145953f * r + 0.00836871658f;
  series = series * r + 0.041668389f;
  series = series * r + 0.166665211f;
  series = series * r + 0.49999994f;
  series = (series * r) * r + r;
  series = series + 1.0f;
  return series * power;
}
#endif

KIT_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// One rounding fewer than x * sigmoid(x).
KIT_HOST_DEVICE float value(float x) { return x / (1.0f + exponential(-x)); }

KIT_HOST_DEVICE float derivative(float x) {
  const float s = sigmoid(x);
  return s * (1.0f + x * (1.0f - s));
}

}  // namespace op
