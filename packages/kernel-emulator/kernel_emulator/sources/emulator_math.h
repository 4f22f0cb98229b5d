// Functions of numbers that CUDA and HIP have beside those of the C library.
#pragma once

// The overloads of min and max; with floating-point arguments the other argument of a NaN is the result.
#define EMULATOR_MIN_MAX(A, B, T)                                                                                     \
  constexpr T min(A a, B b) { return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a); } \
  constexpr T max(A a, B b) { return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a); }
#define EMULATOR_INTEGER(T)                            \
  EMULATOR_MIN_MAX(T, T, T)                            \
  EMULATOR_MIN_MAX(unsigned T, unsigned T, unsigned T) \
  EMULATOR_MIN_MAX(T, unsigned T, unsigned T)          \
  EMULATOR_MIN_MAX(unsigned T, T, unsigned T)
EMULATOR_INTEGER(int)
EMULATOR_INTEGER(long)
EMULATOR_INTEGER(long long)
#undef EMULATOR_INTEGER
#undef EMULATOR_MIN_MAX
#define EMULATOR_MIN_MAX(A, B)                     \
  inline auto min(A a, B b) { return fmin(a, b); } \
  inline auto max(A a, B b) { return fmax(a, b); }
EMULATOR_MIN_MAX(float, float)
EMULATOR_MIN_MAX(float, double)
EMULATOR_MIN_MAX(double, float)
EMULATOR_MIN_MAX(double, double)
#undef EMULATOR_MIN_MAX
inline unsigned umin(unsigned a, unsigned b) { return min(a, b); }
inline unsigned umax(unsigned a, unsigned b) { return max(a, b); }
inline long long llmin(long long a, long long b) { return min(a, b); }
inline long long llmax(long long a, long long b) { return max(a, b); }
inline unsigned long long ullmin(unsigned long long a, unsigned long long b) { return min(a, b); }
inline unsigned long long ullmax(unsigned long long a, unsigned long long b) { return max(a, b); }

// Functions of double, with the overload for float and the function of float. Newer C libraries declare some of them.
namespace emulator {
constexpr double kPi = 3.14159265358979323846;
#define EMULATOR_UNARY(name, expression)                                                  \
  inline double name(double x) { return expression; }                                     \
  inline float name(float x) { return static_cast<float>(name(static_cast<double>(x))); } \
  inline float name##f(float x) { return name(x); }
EMULATOR_UNARY(rsqrt, 1.0 / ::sqrt(x))
EMULATOR_UNARY(rcbrt, 1.0 / ::cbrt(x))
EMULATOR_UNARY(sinpi, ::sin(kPi* ::fmod(x, 2.0)))
EMULATOR_UNARY(cospi, ::cos(kPi* ::fmod(x, 2.0)))
EMULATOR_UNARY(normcdf, 0.5 * ::erfc(-x * 0.70710678118654752440))
EMULATOR_UNARY(cyl_bessel_i0, std::cyl_bessel_i(0.0, ::fabs(x)))
EMULATOR_UNARY(cyl_bessel_i1, ::copysign(std::cyl_bessel_i(1.0, ::fabs(x)), x))
EMULATOR_UNARY(erfcx, x < 25.0 ? ::exp(x * x) * ::erfc(x) : (1.0 - 0.5 / (x * x)) / (x * ::sqrt(kPi)))
// Newton's method for log(erfc(result)) = log(x), from an estimate by Winitzki.
inline double erfcinv_newton(double x) {
  const double product = ::log(x * (2.0 - x)), half = 2.0 / (kPi * 0.147) + 0.5 * product;
  double result = ::sqrt(::sqrt(half * half - product / 0.147) - half);
  for (int i = 0; i < 4; ++i) {
    const double value = ::erfc(result);
    result += ::log(value / x) * value * 0.5 * ::sqrt(kPi) * ::exp(result * result);
  }
  return result;
}
EMULATOR_UNARY(erfcinv, x > 1.0   ? -erfcinv(2.0 - x)
                        : x > 0.0 ? (x < 1.0 ? erfcinv_newton(x) : 0.0)
                                  : (x < 0.0 ? NAN : 1.0 / x + x))
inline double erfinv_newton(double x) {
  double result = 0.5 * ::sqrt(kPi) * x;
  for (int i = 0; i < 5; ++i) result -= (::erf(result) - x) * 0.5 * ::sqrt(kPi) * ::exp(result * result);
  return result;
}
EMULATOR_UNARY(erfinv, ::fabs(x) < 0.5 ? erfinv_newton(x) : ::copysign(erfcinv(1.0 - ::fabs(x)), x))
EMULATOR_UNARY(normcdfinv, -1.41421356237309504880 * erfcinv(2.0 * x))
#undef EMULATOR_UNARY
template <typename T, typename... Rest>
T norm_of(T first, Rest... rest) {
  double sum = static_cast<double>(first) * first;
  ((sum += static_cast<double>(rest) * rest), ...);
  return static_cast<T>(::sqrt(sum));
}
template <typename T>
T norm_of_array(int count, const T* values) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(values[i]) * values[i];
  return static_cast<T>(::sqrt(sum));
}
}  // namespace emulator
#define EMULATOR_NORM(T, suffix)                                                                       \
  inline T rhypot##suffix(T x, T y) { return T(1) / emulator::norm_of(x, y); }                         \
  inline T norm3d##suffix(T x, T y, T z) { return emulator::norm_of(x, y, z); }                        \
  inline T norm4d##suffix(T x, T y, T z, T w) { return emulator::norm_of(x, y, z, w); }                \
  inline T rnorm3d##suffix(T x, T y, T z) { return T(1) / emulator::norm_of(x, y, z); }                \
  inline T rnorm4d##suffix(T x, T y, T z, T w) { return T(1) / emulator::norm_of(x, y, z, w); }        \
  inline T norm##suffix(int count, const T* values) { return emulator::norm_of_array(count, values); } \
  inline T rnorm##suffix(int count, const T* values) { return T(1) / emulator::norm_of_array(count, values); }
EMULATOR_NORM(double, )
EMULATOR_NORM(float, f)
#undef EMULATOR_NORM
#define EMULATOR_USE(name) \
  using emulator::name;    \
  using emulator::name##f;
EMULATOR_USE(rcbrt)
EMULATOR_USE(normcdf)
EMULATOR_USE(cyl_bessel_i0)
EMULATOR_USE(cyl_bessel_i1)
EMULATOR_USE(erfcx)
EMULATOR_USE(erfcinv)
EMULATOR_USE(erfinv)
EMULATOR_USE(normcdfinv)
#undef EMULATOR_USE
// Newer C libraries declare functions of these names.
#define rsqrt emulator::rsqrt
#define rsqrtf emulator::rsqrtf
#define sinpi emulator::sinpi
#define sinpif emulator::sinpif
#define cospi emulator::cospi
#define cospif emulator::cospif
inline float exp10(float x) { return exp10f(x); }
inline float j0(float x) { return j0f(x); }
inline float j1(float x) { return j1f(x); }
inline float jn(int n, float x) { return jnf(n, x); }
inline float y0(float x) { return y0f(x); }
inline float y1(float x) { return y1f(x); }
inline float yn(int n, float x) { return ynf(n, x); }
inline void sincos(float x, float* sine, float* cosine) { sincosf(x, sine, cosine); }
#define EMULATOR_SINCOSPI(T, name) \
  inline void name(T x, T* sine, T* cosine) { *sine = sinpi(x), *cosine = cospi(x); }
EMULATOR_SINCOSPI(double, sincospi)
EMULATOR_SINCOSPI(float, sincospi)
EMULATOR_SINCOSPI(float, sincospif)
#undef EMULATOR_SINCOSPI
inline double fdivide(double x, double y) { return x / y; }
inline float fdividef(float x, float y) { return x / y; }
#define EMULATOR_UNARY(name, expression) \
  inline float name(float x) { return expression; }
EMULATOR_UNARY(__expf, expf(x))
EMULATOR_UNARY(__exp10f, powf(10.0f, x))
EMULATOR_UNARY(__logf, logf(x))
EMULATOR_UNARY(__log2f, log2f(x))
EMULATOR_UNARY(__log10f, log10f(x))
EMULATOR_UNARY(__sinf, sinf(x))
EMULATOR_UNARY(__cosf, cosf(x))
EMULATOR_UNARY(__tanf, tanf(x))
EMULATOR_UNARY(__saturatef, x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f)
EMULATOR_UNARY(__tanhf, tanhf(x))
EMULATOR_UNARY(__frsqrt_rn, 1.0f / sqrtf(x))
#undef EMULATOR_UNARY
inline void __sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
// Operations that round as the name says. Accesses of volatile variables stay between the calls of fesetround.
namespace emulator {
template <typename T, typename X, typename Operation>
T rounded(int mode, X x, Operation operation) {
  if (mode == FE_TONEAREST) return operation(x);
  fesetround(mode);
  volatile X first = x;
  volatile T result = operation(X{first});
  fesetround(FE_TONEAREST);
  return result;
}
}  // namespace emulator
#define EMULATOR_ROUNDED(mode, name, T, parameters, X, expression)                              \
  inline T name parameters {                                                                    \
    return emulator::rounded<T>(mode, x, [=](X x) -> T { return static_cast<T>(expression); }); \
  }
#define EMULATOR_ARITHMETIC(T, of, fused, suffix, mode)                 \
  EMULATOR_ROUNDED(mode, __##of##add_##suffix, T, (T x, T y), T, x + y) \
  EMULATOR_ROUNDED(mode, __##of##sub_##suffix, T, (T x, T y), T, x - y) \
  EMULATOR_ROUNDED(mode, __##of##mul_##suffix, T, (T x, T y), T, x* y)  \
  EMULATOR_ROUNDED(mode, __##of##div_##suffix, T, (T x, T y), T, x / y) \
  EMULATOR_ROUNDED(mode, __##of##rcp_##suffix, T, (T x), T, 1 / x)      \
  EMULATOR_ROUNDED(mode, __##of##sqrt_##suffix, T, (T x), T, sqrt(x))   \
  EMULATOR_ROUNDED(mode, fused##_##suffix, T, (T x, T y, T z), T, fma(x, y, z))
#define EMULATOR_MODE(suffix, mode)                                                                     \
  EMULATOR_ARITHMETIC(float, f, __fmaf, suffix, mode)                                                   \
  EMULATOR_ARITHMETIC(double, d, __fma, suffix, mode)                                                   \
  EMULATOR_ROUNDED(mode, __fmaf_ieee_##suffix, float, (float x, float y, float z), float, fma(x, y, z)) \
  EMULATOR_ROUNDED(mode, __int2float_##suffix, float, (int x), int, x)                                  \
  EMULATOR_ROUNDED(mode, __uint2float_##suffix, float, (unsigned x), unsigned, x)                       \
  EMULATOR_ROUNDED(mode, __ll2float_##suffix, float, (long long x), long long, x)                       \
  EMULATOR_ROUNDED(mode, __ull2float_##suffix, float, (unsigned long long x), unsigned long long, x)    \
  EMULATOR_ROUNDED(mode, __double2float_##suffix, float, (double x), double, x)                         \
  EMULATOR_ROUNDED(mode, __ll2double_##suffix, double, (long long x), long long, x)                     \
  EMULATOR_ROUNDED(mode, __ull2double_##suffix, double, (unsigned long long x), unsigned long long, x)
EMULATOR_MODE(rn, FE_TONEAREST)
EMULATOR_MODE(rz, FE_TOWARDZERO)
EMULATOR_MODE(ru, FE_UPWARD)
EMULATOR_MODE(rd, FE_DOWNWARD)
#undef EMULATOR_MODE
#undef EMULATOR_ARITHMETIC
#undef EMULATOR_ROUNDED
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
// Conversions round as the name says, and saturate; NaN becomes 0, and with 64 bits the smallest or largest value.
namespace emulator {
template <typename T>
T saturated(double x) {
  using Limits = std::numeric_limits<T>;
  if (x != x) return sizeof(T) < 8 ? T{0} : std::is_signed_v<T> ? Limits::min() : Limits::max();
  if (x <= static_cast<double>(Limits::min())) return Limits::min();
  return x >= static_cast<double>(Limits::max()) ? Limits::max() : static_cast<T>(x);
}
}  // namespace emulator
#define EMULATOR_TO_INTEGER(From, name, T)                                                 \
  inline T __##From##2##name##_rn(From x) { return emulator::saturated<T>(nearbyint(x)); } \
  inline T __##From##2##name##_rz(From x) { return emulator::saturated<T>(trunc(x)); }     \
  inline T __##From##2##name##_ru(From x) { return emulator::saturated<T>(ceil(x)); }      \
  inline T __##From##2##name##_rd(From x) { return emulator::saturated<T>(floor(x)); }
EMULATOR_TO_INTEGER(float, int, int)
EMULATOR_TO_INTEGER(float, uint, unsigned)
EMULATOR_TO_INTEGER(float, ll, long long)
EMULATOR_TO_INTEGER(float, ull, unsigned long long)
EMULATOR_TO_INTEGER(double, int, int)
EMULATOR_TO_INTEGER(double, uint, unsigned)
EMULATOR_TO_INTEGER(double, ll, long long)
EMULATOR_TO_INTEGER(double, ull, unsigned long long)
#undef EMULATOR_TO_INTEGER
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulator::bits<float>(x); }
inline int __float_as_int(float x) { return emulator::bits<int>(x); }
inline long long __double_as_longlong(double x) { return emulator::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator::bits<double>(x); }
inline double __hiloint2double(int high, int low) {
  return emulator::bits<double>(static_cast<uint64_t>(high) << 32 | static_cast<unsigned>(low));
}
inline int __double2hiint(double x) { return static_cast<int>(emulator::bits<uint64_t>(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(emulator::bits<uint64_t>(x)); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>((uint64_t{x} * y) >> 32); }
inline int __mulhi(int x, int y) { return static_cast<int>((int64_t{x} * y) >> 32); }
inline uint64_t __umul64hi(uint64_t x, uint64_t y) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(x) * y) >> 64);
}
inline int __mul24(int x, int y) { return x * y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __ffsll(uint64_t x) { return __builtin_ffsll(static_cast<long long>(x)); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(uint64_t x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= ((x >> bit) & 1u) << (31 - bit);
  return reversed;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((uint64_t{high} << 32) | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((((uint64_t{high} << 32) | low) << (shift & 31)) >> 32);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = (uint64_t{high} << 32) | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned select = selector >> (4 * i);
    auto byte = static_cast<unsigned>(bytes >> (8 * (select & 7))) & 0xffu;
    if (select & 8) byte = byte & 0x80u ? 0xffu : 0;
    result |= byte << (8 * i);
  }
  return result;
}
