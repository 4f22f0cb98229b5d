// GELU, SiLU and their derivatives in float32 for the CPU and CUDA, free of branches and calls so that loops vectorize.
//
// Reads:    nothing.
// Must not: include anything of Torch or CUDA.
//
// `Gelu`, `GeluTanh` and `Silu` take their arithmetic from a `Math` parameter: `Accurate` or `Fast`. A `Math` has
//   Number             a float, possibly with a correction term,
//   exp2(x)            2^x for x <= 0, and split_exp2(x) as a Number,
//   divide(x, y)       x / y,
//   normal(x)          the standard normal distribution function,
//   logistic(x, ...)   2^x / (2^x + 1) and 1 / (2^x + 1) for x <= 0,
//   sum(constant, x)   their sum.
// NaN stays NaN. The value at inf is inf, and that at -inf is NaN because the formulas compute -inf * 0.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "geglu/problem.h"
#include "kit/rows.h"

namespace geglu {

// Horner's scheme; the coefficient of x^0 comes first.
KIT_HOST_DEVICE float polynomial(float, float last) { return last; }
template <class... Rest>
KIT_HOST_DEVICE float polynomial(float x, float first, Rest... rest) {
  return polynomial(x, rest...) * x + first;
}

// Splits x <= 0 into a fraction in [-0.5, 0.5], which is returned, and an integer n, of which `scale` is 2^n. Below
// -127 `scale` is 0. The comparison is written so that NaN passes through.
KIT_HOST_DEVICE float split_exponent(float x, float& scale) {
  x = -127.0f > x ? -127.0f : x;
  constexpr float kMagic = 0x1.8p23f;  // adding it rounds to an integer, which then stands in the low bits
  const float shifted = x + kMagic;
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + 0x3f800000u;
  memcpy(&scale, &bits, sizeof(scale));
  return x - (shifted - kMagic);
}

// For float32: results are nearly as exact as one rounding at the end.
struct Accurate {
  // An unevaluated sum of two floats.
  struct Number {
    float high, low;
    static KIT_HOST_DEVICE Number choose(bool first, Number a, Number b) {
      return {first ? a.high : b.high, first ? a.low : b.low};
    }
    KIT_HOST_DEVICE float rounded() const { return high + low; }
    KIT_HOST_DEVICE float plus(float other) const { return high + (low + other); }
    KIT_HOST_DEVICE float plus_one() const { return (1.0f + high) + low; }
    KIT_HOST_DEVICE float times(float other) const { return high * other + low * other; }
    KIT_HOST_DEVICE float times(Number other) const {
      return high * other.high + (high * other.low + low * other.high);
    }
  };

  // Compensated if |other| is at most about |constant|; else `low` is only an approximation.
  static KIT_HOST_DEVICE Number sum(double constant, float other) {
    const auto high = static_cast<float>(constant), rounded = high + other;
    return {rounded, (high - rounded) + other + static_cast<float>(constant - high)};
  }

  static KIT_HOST_DEVICE float exp2(float x) { return split_exp2(x).rounded(); }

  // 2^x for x <= 0, as a power of two and a remainder that is small for small |x|.
  static KIT_HOST_DEVICE Number split_exp2(float x) {
    float power;
    const float rest = split_exponent(x, power);
    const float slope = polynomial(rest, 6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f, 9.618436918e-03f,
                                   1.339887502e-03f, 1.535336196e-04f);
    return {power, power * (rest * slope)};
  }

  static KIT_HOST_DEVICE float divide(float x, float y) { return x / y; }

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
    const Number small = split_exp2(log2_tail(fabsf(x)));
    return Number::choose(x < 0.0f, small, {1.0f - small.high, -small.low});
  }

 private:
  // log2 of the normal distribution function at -t, for t >= 0. The absolute error of 2^log2_tail is at most 4e-9; the
  // relative error is at most 2e-7 up to t = 5.5. The polynomial decreases without bound.
  static KIT_HOST_DEVICE float log2_tail(float t) {
    return polynomial(t, -1.0f, -1.151104093e+00f, -4.592247605e-01f, -5.241658911e-02f, 6.883515511e-03f,
                      8.384621469e-05f, -3.433951060e-04f, 1.058917769e-04f, -1.941714800e-05f, 2.354633352e-06f,
                      -1.844738193e-07f, 8.419983821e-09f, -1.685437068e-10f);
  }
};

// For 16-bit dtypes: accurate to 3e-5, a tenth of the mean error of rounding to 16 bits. `Intrinsics` gives exp2 and
// reciprocal.
template <class Intrinsics>
struct Fast {
  struct Number {
    float value;
    static KIT_HOST_DEVICE Number choose(bool first, Number a, Number b) { return {first ? a.value : b.value}; }
    KIT_HOST_DEVICE float rounded() const { return value; }
    KIT_HOST_DEVICE float plus(float other) const { return value + other; }
    KIT_HOST_DEVICE float plus_one() const { return 1.0f + value; }
    KIT_HOST_DEVICE float times(float other) const { return value * other; }
    KIT_HOST_DEVICE float times(Number other) const { return value * other.value; }
  };

  static KIT_HOST_DEVICE Number sum(double constant, float other) { return {static_cast<float>(constant) + other}; }

  static KIT_HOST_DEVICE float exp2(float x) { return Intrinsics::exp2(x); }

  static KIT_HOST_DEVICE Number split_exp2(float x) { return {exp2(x)}; }

  static KIT_HOST_DEVICE float divide(float x, float y) { return x * Intrinsics::reciprocal(y); }

  static KIT_HOST_DEVICE void logistic(float x, Number& small, Number& large) {
    const float power = exp2(x);
    large = {Intrinsics::reciprocal(1.0f + power)};
    small = {power * large.value};
  }

  static KIT_HOST_DEVICE Number normal(float x) {
    const float small = exp2(log2_tail(fabsf(x)));
    return {x < 0.0f ? small : 1.0f - small};
  }

 private:
  // The relative error of 2^log2_tail is at most 3e-5 up to t = 5.5, and 4e-4 at t = 9.
  static KIT_HOST_DEVICE float log2_tail(float t) {
    return polynomial(t, -1.0f, -1.150799058e+00f, -4.597317989e-01f, -5.273749134e-02f, 7.960423722e-03f,
                      -8.062422214e-04f, 4.772346880e-05f, -1.230269020e-06f);
  }
};

// In portable C++, vectorizable.
struct PortableIntrinsics {
  static KIT_HOST_DEVICE float exp2(float x) {
    float power;
    const float rest = split_exponent(x, power);
    return power * polynomial(rest, 1.0f, 6.931241933e-01f, 2.402409862e-01f, 5.590642590e-02f, 9.582853236e-03f);
  }

  static KIT_HOST_DEVICE float reciprocal(float x) { return 1.0f / x; }
};

using FastPortable = Fast<PortableIntrinsics>;

constexpr double kLog2E = 1.4426950408889634;

// x * Phi(x)
template <class Math>
struct Gelu {
  static KIT_HOST_DEVICE float value(float x) { return x * Math::normal(x).rounded(); }

  static KIT_HOST_DEVICE void value_and_derivative(float x, float& value, float& derivative) {
    const auto phi = Math::normal(x);
    constexpr float kDensity = 0.398942280f;  // 1 / sqrt(2 pi)
    value = x * phi.rounded();
    derivative = phi.plus(x * (kDensity * Math::exp2(x * x * static_cast<float>(-0.5 * kLog2E))));
  }
};

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), which is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)).
template <class Math>
struct GeluTanh {
  static KIT_HOST_DEVICE float value(float x) {
    typename Math::Number small, large;
    sigmoid_pair(x, small, large);
    return x * Math::Number::choose(x < 0.0f, small, large).rounded();
  }

  static KIT_HOST_DEVICE void value_and_derivative(float x, float& value, float& derivative) {
    typename Math::Number small, large;
    sigmoid_pair(x, small, large);
    const auto sigmoid = Math::Number::choose(x < 0.0f, small, large);
    // Clamping the square avoids inf * 0; `small` is 0 well before the limit.
    const float square = x * x;
    const auto inner = Math::sum(kScale, static_cast<float>(3 * kCubic) * (square > 1e4f ? 1e4f : square));
    value = x * sigmoid.rounded();
    derivative = sigmoid.plus(inner.times(x * large.times(small)));
  }

 private:
  static constexpr double kScale = 1.5957691216057308;  // 2 * sqrt(2 / pi)
  static constexpr double kCubic = 0.044715 * kScale;

  // Sets `small` to sigmoid(-|y|) and `large` to sigmoid(|y|) for y = 2 * sqrt(2 / pi) * (x + 0.044715 x^3). Both come
  // from exp(-|y|) <= 1, so that neither is computed as a difference, which would cancel.
  static KIT_HOST_DEVICE void sigmoid_pair(float x, typename Math::Number& small, typename Math::Number& large) {
    constexpr auto kFirst = static_cast<float>(-kLog2E * kScale), kThird = static_cast<float>(-kLog2E * kCubic);
    Math::logistic(fabsf(x) * (kFirst + kThird * (x * x)), small, large);
  }
};

// x * sigmoid(x), as x / (1 + exp(-x)): without fused multiply-add, as on the CPU, the error of the quotient in float32
// is that of PyTorch, and that of x * sigmoid(x) is 1.16 times as large.
template <class Math>
struct Silu {
  static KIT_HOST_DEVICE float value(float x) {
    // From exp(-|x|), which cannot overflow.
    const auto power = Math::split_exp2(exponent(x));
    return Math::divide(x < 0.0f ? power.times(x) : x, power.plus_one());
  }

  static KIT_HOST_DEVICE void value_and_derivative(float x, float& value, float& derivative) {
    typename Math::Number small, large;
    Math::logistic(exponent(x), small, large);
    value = Silu::value(x);
    derivative = Math::Number::choose(x < 0.0f, small, large).plus(x * large.times(small));
  }

 private:
  static KIT_HOST_DEVICE float exponent(float x) { return fabsf(x) * static_cast<float>(-kLog2E); }
};

// Calls `use` with a value of the activation's class.
template <class Math, class Use>
inline __attribute__((always_inline)) void with_activation(Activation activation, const Use& use) {
  switch (activation) {
    case Activation::gelu:
      return use(Gelu<Math>{});
    case Activation::gelu_tanh:
      return use(GeluTanh<Math>{});
    case Activation::silu:
      return use(Silu<Math>{});
  }
}

}  // namespace geglu
