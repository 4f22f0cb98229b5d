// __half and __nv_bfloat16, which HIP calls __hip_bfloat16. Their arithmetic is that of float, rounded.
#pragma once

namespace emulator {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return bits<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  return bits<float>(sign | bits<uint32_t>(bits<float>(rest << 13) * 0x1p112f));
}
inline uint16_t float_to_half(float value) {
  const auto all = bits<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(all >> 16 & 0x8000u);
  uint32_t rest = all & 0x7fffffffu;
  if (rest > 0x7f800000u) return 0x7fffu;
  if (rest >= 0x477ff000u) return sign | 0x7c00u;
  if (rest < 0x38800000u) {  // subnormal: the unit of 0.5f is that of the result
    return static_cast<uint16_t>(sign | (bits<uint32_t>(bits<float>(rest) + 0.5f) - bits<uint32_t>(0.5f)));
  }
  rest += 0xfffu + (rest >> 13 & 1u);
  return static_cast<uint16_t>(sign | (rest - (112u << 23)) >> 13);
}
inline float bfloat16_to_float(uint16_t value) { return bits<float>(static_cast<uint32_t>(value) << 16); }
inline uint16_t float_to_bfloat16(float value) {
  const auto all = bits<uint32_t>(value);
  if ((all & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return static_cast<uint16_t>((all + 0x7fffu + (all >> 16 & 1u)) >> 16);
}

}  // namespace emulator

#define EMULATOR_TYPE(T, T2, name, hip)                                                               \
  struct T {                                                                                          \
    uint16_t x;                                                                                       \
    T() = default;                                                                                    \
    template <typename Number, typename = std::enable_if_t<std::is_arithmetic_v<Number>>>             \
    T(Number value) : x(emulator::float_to_##name(static_cast<float>(value))) {}                      \
    operator float() const { return emulator::name##_to_float(x); }                                   \
    T operator-() const { return emulator::bits<T>(static_cast<uint16_t>(x ^ 0x8000u)); }             \
    T& operator+=(T other) { return *this = *this + other; }                                          \
    T& operator*=(T other) { return *this = *this * other; }                                          \
    friend T operator+(T a, T b) { return float(a) + float(b); }                                      \
    friend T operator-(T a, T b) { return float(a) - float(b); }                                      \
    friend T operator*(T a, T b) { return float(a) * float(b); }                                      \
    friend T operator/(T a, T b) { return float(a) / float(b); }                                      \
  };                                                                                                  \
  struct alignas(4) T2 {                                                                              \
    T x, y;                                                                                           \
  };                                                                                                  \
  inline float __##hip##2float(T x) { return x; }                                                     \
  inline T __float2##hip(float x) { return x; }                                                       \
  inline T __float2##hip##_rn(float x) { return x; }                                                  \
  inline T2 __floats2##hip##2_rn(float x, float y) { return {x, y}; }                                 \
  inline T2 __float22##hip##2_rn(float2 x) { return {x.x, x.y}; }                                     \
  inline T2 __##hip##2##hip##2(T x) { return {x, x}; }                                                \
  inline T2 __halves2##hip##2(T x, T y) { return {x, y}; }                                            \
  inline float2 __##hip##22float2(T2 x) { return {x.x, x.y}; }                                        \
  inline float __low2float(T2 x) { return x.x; }                                                      \
  inline float __high2float(T2 x) { return x.y; }                                                     \
  inline T __low2##hip(T2 x) { return x.x; }                                                          \
  inline T __high2##hip(T2 x) { return x.y; }                                                         \
  inline T __ushort_as_##hip(uint16_t x) { return emulator::bits<T>(x); }                             \
  inline uint16_t __##hip##_as_ushort(T x) { return x.x; }                                            \
  inline T __hadd(T a, T b) { return a + b; }                                                         \
  inline T __hsub(T a, T b) { return a - b; }                                                         \
  inline T __hmul(T a, T b) { return a * b; }                                                         \
  inline T __hdiv(T a, T b) { return a / b; }                                                         \
  inline T __hmax(T a, T b) { return fmaxf(a, b); }                                                   \
  inline T __hmin(T a, T b) { return fminf(a, b); }                                                   \
  inline T __hneg(T a) { return -a; }                                                                 \
  inline T __hfma(T a, T b, T c) { return static_cast<float>(fma(double(a), double(b), double(c))); } \
  inline T2 __hadd2(T2 a, T2 b) { return {a.x + b.x, a.y + b.y}; }                                    \
  inline T2 __hmul2(T2 a, T2 b) { return {a.x * b.x, a.y * b.y}; }                                    \
  inline T2 __hadd2_rn(T2 a, T2 b) { return __hadd2(a, b); }                                          \
  inline T2 __hmul2_rn(T2 a, T2 b) { return __hmul2(a, b); }                                          \
  inline T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
EMULATOR_TYPE(__half, __half2, half, half)
EMULATOR_TYPE(__nv_bfloat16, __nv_bfloat162, bfloat16, bfloat16)
#undef EMULATOR_TYPE
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
using __hip_bfloat16 = __nv_bfloat16;
using __hip_bfloat162 = __nv_bfloat162;
