// GELU and its derivative in float32, without branches and without calls, for the CPU and for CUDA.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// `Math` says how: Accurate or Brief below, or with what a GPU has at hand. It has a kind of Number; exp2; `normal`,
// the distribution function of the normal distribution; `logistic`, the shares that 2^x and 1 have of their sum, for x
// of at most 0; and `sum`, of a constant and a number. NaN stays NaN; gelu(inf) is inf, and gelu(-inf) is NaN, as the
// formula -inf * 0 has it.
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

// As good as one rounding at the end, nearly: what float32 code is held to.
struct Accurate {
  // A number in two parts.
  struct Number {
    float high, low;
    static KIT_HOST_DEVICE Number choose(bool first, Number a, Number b) {
      return {first ? a.high : b.high, first ? a.low : b.low};
    }
    KIT_HOST_DEVICE float rounded() const { return high + low; }
    KIT_HOST_DEVICE float plus(float other) const { return high + (low + other); }
    KIT_HOST_DEVICE float times(float other) const { return high * other + low * other; }
    KIT_HOST_DEVICE float times(Number other) const {
      return high * other.high + (high * other.low + low * other.high);
    }
  };

  // For an `other` of about as much as `constant`, or less, and roughly otherwise.
  static KIT_HOST_DEVICE Number sum(double constant, float other) {
    const auto high = static_cast<float>(constant), rounded = high + other;
    return {rounded, (high - rounded) + other + static_cast<float>(constant - high)};
  }

  static KIT_HOST_DEVICE float exp2(float x) { return split_exp2(x).rounded(); }

  static KIT_HOST_DEVICE void logistic(float x, Number& small, Number& large) {
    const Number power = split_exp2(x);
    const float base = 1.0f + power.high, sum = base + power.low;
    const float lost = (power.low - (sum - base)) + (power.high - (base - 1.0f));
    const float quotient = 1.0f / sum;
    const float correction = (1.0f - quotient * sum) - quotient * lost;
    large = {quotient, quotient * correction};
    small = {power.high * quotient, power.low * quotient + power.high * large.low};
  }

  static KIT_HOST_DEVICE Number normal(float x) {
    const Number small = split_exp2(tail(fabsf(x)));
    return Number::choose(x < 0.0f, small, {1.0f - small.high, -small.low});
  }

 private:
  // 2^x, for x of at most 0: a power of 2, and the rest, which is small where x is.
  static KIT_HOST_DEVICE Number split_exp2(float x) {
    float power;
    const float rest = split_exponent(x, power);
    const float slope = polynomial(rest, 6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f, 9.618436918e-03f,
                                   1.339887502e-03f, 1.535336196e-04f);
    return {power, power * (rest * slope)};
  }

  // The logarithm to base 2 of the distribution function at -t: off by at most 4e-9 in 2^tail, and by 2e-7 of that up
  // to t = 5.5. The polynomial falls without end.
  static KIT_HOST_DEVICE float tail(float t) {
    return polynomial(t, -1.0f, -1.151104093e+00f, -4.592247605e-01f, -5.241658911e-02f, 6.883515511e-03f,
                      8.384621469e-05f, -3.433951060e-04f, 1.058917769e-04f, -1.941714800e-05f, 2.354633352e-06f,
                      -1.844738193e-07f, 8.419983821e-09f, -1.685437068e-10f);
  }
};

// To 3e-5, a tenth of what rounding to 16 bits costs in the mean. `Instructions` are those of a processor.
template <class Instructions>
struct Rough {
  struct Number {
    float value;
    static KIT_HOST_DEVICE Number choose(bool first, Number a, Number b) { return {first ? a.value : b.value}; }
    KIT_HOST_DEVICE float rounded() const { return value; }
    KIT_HOST_DEVICE float plus(float other) const { return value + other; }
    KIT_HOST_DEVICE float times(float other) const { return value * other; }
    KIT_HOST_DEVICE float times(Number other) const { return value * other.value; }
  };

  static KIT_HOST_DEVICE Number sum(double constant, float other) { return {static_cast<float>(constant) + other}; }

  static KIT_HOST_DEVICE float exp2(float x) { return Instructions::exp2(x); }

  static KIT_HOST_DEVICE void logistic(float x, Number& small, Number& large) {
    const float power = exp2(x);
    large = {Instructions::reciprocal(1.0f + power)};
    small = {power * large.value};
  }

  static KIT_HOST_DEVICE Number normal(float x) {
    const float small = exp2(tail(fabsf(x)));
    return {x < 0.0f ? small : 1.0f - small};
  }

 private:
  // 2^tail has this relative error up to t = 5.5, and one of 4e-4 at 9.
  static KIT_HOST_DEVICE float tail(float t) {
    return polynomial(t, -1.0f, -1.150799058e+00f, -4.597317989e-01f, -5.273749134e-02f, 7.960423722e-03f,
                      -8.062422214e-04f, 4.772346880e-05f, -1.230269020e-06f);
  }
};

// Those that every processor has.
struct Plain {
  static KIT_HOST_DEVICE float exp2(float x) {
    float power;
    const float rest = split_exponent(x, power);
    return power * polynomial(rest, 1.0f, 6.931241933e-01f, 2.402409862e-01f, 5.590642590e-02f, 9.582853236e-03f);
  }

  static KIT_HOST_DEVICE float reciprocal(float x) { return 1.0f / x; }
};

using Brief = Rough<Plain>;

constexpr double kLog2E = 1.4426950408889634;

// x * Phi(x)
template <class Math>
struct Gelu {
  static KIT_HOST_DEVICE float value(float x) { return x * Math::normal(x).rounded(); }

  static KIT_HOST_DEVICE void value_and_slope(float x, float& value, float& slope) {
    const auto phi = Math::normal(x);
    constexpr float kDensity = 0.398942280f;  // 1 / sqrt(2 pi)
    value = x * phi.rounded();
    slope = phi.plus(x * (kDensity * Math::exp2(x * x * static_cast<float>(-0.5 * kLog2E))));
  }
};

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), which is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)).
template <class Math>
struct GeluTanh {
  static KIT_HOST_DEVICE float value(float x) {
    typename Math::Number small, large;
    shares(x, small, large);
    return x * Math::Number::choose(x < 0.0f, small, large).rounded();
  }

  static KIT_HOST_DEVICE void value_and_slope(float x, float& value, float& slope) {
    typename Math::Number small, large;
    shares(x, small, large);
    const auto sigmoid = Math::Number::choose(x < 0.0f, small, large);
    // Where the square is limited, what it is multiplied with is 0 already.
    const float square = x * x;
    const auto inner = Math::sum(kScale, static_cast<float>(3 * kCubic) * (square > 1e4f ? 1e4f : square));
    value = x * sigmoid.rounded();
    slope = sigmoid.plus(inner.times(x * large.times(small)));
  }

 private:
  static constexpr double kScale = 1.5957691216057308;  // 2 * sqrt(2 / pi)
  static constexpr double kCubic = 0.044715 * kScale;

  // Of exp(-|2 * sqrt(2 / pi) * (x + 0.044715 x^3)|), which is at most 1, so that neither the sigmoid nor what it
  // leaves of 1 comes from a difference.
  static KIT_HOST_DEVICE void shares(float x, typename Math::Number& small, typename Math::Number& large) {
    constexpr auto kFirst = static_cast<float>(-kLog2E * kScale), kThird = static_cast<float>(-kLog2E * kCubic);
    Math::logistic(fabsf(x) * (kFirst + kThird * (x * x)), small, large);
  }
};

}  // namespace geglu
