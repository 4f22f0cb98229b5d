// GELU and its derivative in float32, without branches and without calls, for the CPU and for CUDA.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// `Math` says how: Accurate or Brief below, or what a GPU has at hand. It provides exp2, share and tail.
// NaN stays NaN; gelu(inf) is inf, and gelu(-inf) is NaN, as the formula -inf * 0 has it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kit/rows.h"

namespace geglu {

// The sum of coefficients times powers of x, from the power 0 up.
KIT_HOST_DEVICE float polynomial(float, float last) { return last; }
template <class... Rest>
KIT_HOST_DEVICE float polynomial(float x, float first, Rest... rest) {
  return polynomial(x, rest...) * x + first;
}

// x of at most 0 in two: a number from -0.5 to 0.5, and 2 to the power of the rest, an integer. Below -127 that is 0. A
// comparison with NaN is false and keeps it.
KIT_HOST_DEVICE float split_exponent(float x, float& scale) {
  x = -127.0f > x ? -127.0f : x;
  constexpr float kMagic = 0x1.8p23f;  // a sum with it has the nearest integer in its low bits
  const float shifted = x + kMagic;
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + 0x3f800000u;
  memcpy(&scale, &bits, sizeof(scale));
  return x - (shifted - kMagic);
}

// All to 1e-7.
struct Accurate {
  // 2^x, for x of at most 0
  static KIT_HOST_DEVICE float exp2(float x) {
    float scale;
    const float rest = split_exponent(x, scale);
    return scale * polynomial(rest, 1.0f, 6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f, 9.618436918e-03f,
                              1.339887502e-03f, 1.535336196e-04f);
  }

  // 1 / (1 + x), for x from 0 to 1, with what the sum loses put back.
  static KIT_HOST_DEVICE float share(float x) {
    const float sum = 1.0f + x, lost = x - (sum - 1.0f);
    const float quotient = 1.0f / sum;
    return quotient - quotient * quotient * lost;
  }

  // The logarithm to base 2 of Phi(-t), where Phi is the distribution function of the normal distribution, for t of at
  // least 0: off by at most 4e-8 in 2^tail, relative to which the error grows to 3e-6 at 5.5. The polynomial falls
  // without end.
  static KIT_HOST_DEVICE float tail(float t) {
    return polynomial(t, -1.0f, -1.151105404e+00f, -4.592085481e-01f, -5.248054862e-02f, 7.005617023e-03f,
                      -4.738863208e-05f, -2.575393009e-04f, 7.032747089e-05f, -9.976945876e-06f, 7.729840377e-07f,
                      -2.576207514e-08f);
  }
};

// To 3e-5, a tenth of what rounding to 16 bits costs in the mean.
struct Brief {
  static KIT_HOST_DEVICE float exp2(float x) {
    float scale;
    const float rest = split_exponent(x, scale);
    return scale * polynomial(rest, 1.0f, 6.931241933e-01f, 2.402409862e-01f, 5.590642590e-02f, 9.582853236e-03f);
  }

  static KIT_HOST_DEVICE float share(float x) { return 1.0f / (1.0f + x); }

  // 2^tail has this relative error up to t = 5.5, and one of 4e-4 at 9.
  static KIT_HOST_DEVICE float tail(float t) {
    return polynomial(t, -1.0f, -1.150799058e+00f, -4.597317989e-01f, -5.273749134e-02f, 7.960423722e-03f,
                      -8.062422214e-04f, 4.772346880e-05f, -1.230269020e-06f);
  }
};

constexpr double kLog2E = 1.4426950408889634;

// x * Phi(x)
template <class Math>
struct Gelu {
  static KIT_HOST_DEVICE float value(float x) { return x * distribution(x); }

  static KIT_HOST_DEVICE void value_and_slope(float x, float& value, float& slope) {
    const float phi = distribution(x);
    constexpr float kDensity = 0.398942280f;  // 1 / sqrt(2 pi)
    value = x * phi;
    slope = phi + x * (kDensity * Math::exp2(x * x * static_cast<float>(-0.5 * kLog2E)));
  }

 private:
  // Where x is negative, 1 + erf would lose the digits that Phi(-|x|) has.
  static KIT_HOST_DEVICE float distribution(float x) {
    const float tail = Math::exp2(Math::tail(fabsf(x)));
    return x < 0.0f ? tail : 1.0f - tail;
  }
};

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), which is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)).
template <class Math>
struct GeluTanh {
  static KIT_HOST_DEVICE float value(float x) {
    const float decay = decay_of(x), large = Math::share(decay);
    return x * (x < 0.0f ? decay * large : large);
  }

  static KIT_HOST_DEVICE void value_and_slope(float x, float& value, float& slope) {
    const float decay = decay_of(x), large = Math::share(decay), small = decay * large;
    const float sigmoid = x < 0.0f ? small : large;
    // Where the square is limited, what it is multiplied with is 0 already.
    const float square = x * x;
    const float inner = static_cast<float>(kScale) + static_cast<float>(3 * kCubic) * (square > 1e4f ? 1e4f : square);
    value = x * sigmoid;
    slope = sigmoid + x * (large * small) * inner;
  }

 private:
  static constexpr double kScale = 1.5957691216057308;  // 2 * sqrt(2 / pi)
  static constexpr double kCubic = 0.044715 * kScale;

  // exp(-|2 * sqrt(2 / pi) * (x + 0.044715 x^3)|): at most 1, so that neither the sigmoid nor what it leaves of 1
  // comes from a difference.
  static KIT_HOST_DEVICE float decay_of(float x) {
    constexpr auto kFirst = static_cast<float>(-kLog2E * kScale), kThird = static_cast<float>(-kLog2E * kCubic);
    return Math::exp2(fabsf(x) * (kFirst + kThird * (x * x)));
  }
};

}  // namespace geglu
