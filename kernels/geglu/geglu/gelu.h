// GELU and its derivative in float32, without branches and without calls, for the CPU and for CUDA.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// `Math` provides exp2 and share: `Accurate` below, or, for results of 16 bits, what a GPU has at hand.
// NaN stays NaN; gelu(inf) is inf, and gelu(-inf) is NaN, as the formula -inf * 0 has it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kit/rows.h"

namespace geglu {

// Both to 1e-7.
struct Accurate {
  static KIT_HOST_DEVICE float exp2(float x) {
    // Beyond these the result is 0 or infinity. A comparison with NaN is false and keeps it.
    x = x < -127.0f ? -127.0f : x;
    x = x > 128.0f ? 128.0f : x;
    constexpr float kMagic = 0x1.8p23f;  // a sum with it has the nearest integer in its low bits
    const float shifted = x + kMagic;
    const float rest = x - (shifted - kMagic);
    // 2^rest on [-0.5, 0.5], to 2e-9 before rounding. Here and below, even and odd powers apart: half as many steps
    // wait for one another.
    const float square = rest * rest;
    float even = 1.535336196e-04f, odd = 1.339887502e-03f;
    even = even * square + 9.618436918e-03f;
    odd = odd * square + 5.550332367e-02f;
    even = even * square + 2.402264774e-01f;
    odd = odd * square + 6.931471825e-01f;
    even = even * square + 1.0f;
    const float power = odd * rest + even;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits << 23) + 0x3f800000u;
    float scale;
    memcpy(&scale, &bits, sizeof(scale));
    return power * scale;
  }

  // 1 / (1 + x), for x from 0 to 1, with what the sum loses put back.
  static KIT_HOST_DEVICE float share(float x) {
    const float sum = 1.0f + x, lost = x - (sum - 1.0f);
    const float quotient = 1.0f / sum;
    return quotient - quotient * quotient * lost;
  }
};

constexpr double kLog2E = 1.4426950408889634;

// x * Phi(x), where Phi is the distribution function of the normal distribution.
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
  // Phi(-|x|) is 2 to the power of a polynomial, and Phi(|x|) what it leaves of 1: off by at most 4e-8. The relative
  // error grows to 3e-6 at -5.5, where 1 + erf has lost all but two digits.
  static KIT_HOST_DEVICE float distribution(float x) {
    float t = fabsf(x);
    t = t > 14.0f ? 14.0f : t;  // where 2^power is 0 already
    const float square = t * t;
    float even = -2.576207514e-08f, odd = 7.729840377e-07f;
    even = even * square + -9.976945876e-06f;
    odd = odd * square + 7.032747089e-05f;
    even = even * square + -2.575393009e-04f;
    odd = odd * square + -4.738863208e-05f;
    even = even * square + 7.005617023e-03f;
    odd = odd * square + -5.248054862e-02f;
    even = even * square + -4.592085481e-01f;
    odd = odd * square + -1.151105404e+00f;
    even = even * square + -1.0f;
    const float power = odd * t + even;
    const float tail = Math::exp2(power);
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
