// The types of CUDA's math functions for arguments of each type, as the headers of CUDA 13 declare them.
#include <type_traits>

// clang-format off
#define SAME(call, type) static_assert(std::is_same<decltype(call), type>::value, #call);
#define UNARY(name) SAME(name(f), float) SAME(name(d), double) SAME(name##f(f), float)
#define UNARY_OF_INTEGERS(name) UNARY(name) SAME(name(i), double)
#define BINARY(name) SAME(name(f, f), float) SAME(name(d, d), double) SAME(name##f(f, f), float) \
  SAME(name(f, d), double) SAME(name(d, f), double) SAME(name(i, f), double) SAME(name(i, i), double)
#define TO_INTEGER(name, T) SAME(name(f), T) SAME(name(d), T) SAME(name##f(f), T)
#define INTEGERS(T, Unsigned) SAME(min(T{}, T{}), T) SAME(max(T{}, T{}), T) SAME(min(Unsigned{}, Unsigned{}), Unsigned) \
  SAME(max(Unsigned{}, Unsigned{}), Unsigned) SAME(min(T{}, Unsigned{}), Unsigned) SAME(max(Unsigned{}, T{}), Unsigned) \
  SAME(abs(T{}), T)
#define PROPERTY(name) SAME(name(f), bool) SAME(name(d), bool) SAME(name(i), bool)
#define WITH_INTEGER(name, integer) \
  SAME(name(f, integer), float) SAME(name(d, integer), double) SAME(name##f(f, integer), float)
#define ROUNDED(name, T, ...) SAME(name##_rn(__VA_ARGS__), T) SAME(name##_rz(__VA_ARGS__), T) \
  SAME(name##_ru(__VA_ARGS__), T) SAME(name##_rd(__VA_ARGS__), T)
#define ARITHMETIC(of, fused, T, x) ROUNDED(of##add, T, x, x) ROUNDED(of##sub, T, x, x) ROUNDED(of##mul, T, x, x) \
  ROUNDED(of##div, T, x, x) ROUNDED(of##rcp, T, x) ROUNDED(of##sqrt, T, x) ROUNDED(fused, T, x, x, x)
#define FAST(name) SAME(name(f), float)
using Unsigned = unsigned;
using Long = long;
using UnsignedLong = unsigned long;
using LongLong = long long;
using UnsignedLongLong = unsigned long long;

__global__ void overloads(float f, double d, int i, long l) {
  INTEGERS(int, Unsigned) INTEGERS(Long, UnsignedLong) INTEGERS(LongLong, UnsignedLongLong)
  SAME(min(f, f), float) SAME(max(f, f), float) SAME(min(f, d), double) SAME(max(d, f), double) SAME(max(d, d), double)
  SAME(abs(f), float) SAME(abs(d), double) SAME(abs(short{1}), int) SAME(labs(l), long) SAME(llabs(l), long long)
  SAME(umin(1u, 2u), unsigned) SAME(llmax(1, 2), long long) SAME(ullmin(1, 2), unsigned long long)
  UNARY(acos) UNARY(acosh) UNARY(asin) UNARY(asinh) UNARY(atan) UNARY(atanh) UNARY(j0) UNARY(j1) UNARY(y0) UNARY(y1)
  UNARY(cyl_bessel_i0) UNARY(cyl_bessel_i1) UNARY(cospi) UNARY(erfc) UNARY(erfcinv) UNARY(erfcx) UNARY(erfinv)
  UNARY(exp10) UNARY(lgamma) UNARY(logb) UNARY(nearbyint) UNARY(normcdf) UNARY(normcdfinv) UNARY(rcbrt) UNARY(rint)
  UNARY(round) UNARY(rsqrt) UNARY(sinpi) UNARY(tgamma) UNARY(trunc)
  UNARY_OF_INTEGERS(cbrt) UNARY_OF_INTEGERS(ceil) UNARY_OF_INTEGERS(cos) UNARY_OF_INTEGERS(cosh)
  UNARY_OF_INTEGERS(erf) UNARY_OF_INTEGERS(exp) UNARY_OF_INTEGERS(exp2) UNARY_OF_INTEGERS(expm1)
  UNARY_OF_INTEGERS(fabs) UNARY_OF_INTEGERS(floor) UNARY_OF_INTEGERS(log) UNARY_OF_INTEGERS(log10)
  UNARY_OF_INTEGERS(log1p) UNARY_OF_INTEGERS(log2) UNARY_OF_INTEGERS(sin) UNARY_OF_INTEGERS(sinh)
  UNARY_OF_INTEGERS(sqrt) UNARY_OF_INTEGERS(tan) UNARY_OF_INTEGERS(tanh)
  BINARY(atan2) BINARY(copysign) BINARY(fdim) BINARY(fmax) BINARY(fmin) BINARY(fmod) BINARY(hypot) BINARY(nextafter)
  BINARY(remainder)
  SAME(pow(f, f), float) SAME(pow(d, d), double) SAME(pow(f, d), double) SAME(pow(d, i), double) SAME(powf(f, f), float)
  PROPERTY(isnan) PROPERTY(isinf) PROPERTY(isfinite) PROPERTY(signbit)
  TO_INTEGER(ilogb, int) TO_INTEGER(lrint, Long) TO_INTEGER(lround, Long) TO_INTEGER(llrint, LongLong)
  TO_INTEGER(llround, LongLong) WITH_INTEGER(ldexp, i) WITH_INTEGER(scalbn, i) WITH_INTEGER(scalbln, l)
  WITH_INTEGER(frexp, &i) SAME(modf(f, &f), float) SAME(modf(d, &d), double) SAME(modff(f, &f), float)
  SAME(remquo(f, f, &i), float) SAME(remquo(d, d, &i), double) SAME(remquof(f, f, &i), float)
  SAME(fma(f, f, f), float) SAME(fma(d, d, d), double) SAME(fma(f, d, f), double) SAME(fmaf(f, f, f), float)
  SAME(jn(i, f), float) SAME(jn(i, d), double) SAME(jnf(i, f), float)
  SAME(yn(i, f), float) SAME(yn(i, d), double) SAME(ynf(i, f), float)
  sincos(f, &f, &f), sincos(d, &d, &d), sincosf(f, &f, &f);
  sincospi(f, &f, &f), sincospi(d, &d, &d), sincospif(f, &f, &f);
  SAME(rhypot(f, f), double) SAME(rhypotf(f, f), float) SAME(norm3d(f, f, f), double) SAME(norm3df(f, f, f), float)
  SAME(norm4d(d, d, d, d), double) SAME(norm4df(f, f, f, f), float) SAME(rnorm3d(f, f, f), double)
  SAME(rnorm3df(f, f, f), float) SAME(rnorm4d(d, d, d, d), double) SAME(rnorm4df(f, f, f, f), float)
  SAME(norm(i, &d), double) SAME(normf(i, &f), float) SAME(rnorm(i, &d), double) SAME(rnormf(i, &f), float)
  SAME(nan(""), double) SAME(nanf(""), float) SAME(fdividef(f, f), float) SAME(fdivide(f, f), double)
  ARITHMETIC(__f, __fmaf, float, f) ARITHMETIC(__d, __fma, double, d) ROUNDED(__fmaf_ieee, float, f, f, f)
  ROUNDED(__float2int, int, f) ROUNDED(__float2uint, Unsigned, f) ROUNDED(__float2ll, LongLong, f)
  ROUNDED(__float2ull, UnsignedLongLong, f) ROUNDED(__double2int, int, d) ROUNDED(__double2uint, Unsigned, d)
  ROUNDED(__double2ll, LongLong, d) ROUNDED(__double2ull, UnsignedLongLong, d) ROUNDED(__double2float, float, d)
  ROUNDED(__int2float, float, i) ROUNDED(__uint2float, float, 1u) ROUNDED(__ll2float, float, 1ll)
  ROUNDED(__ull2float, float, 1ull) ROUNDED(__ll2double, double, 1ll) ROUNDED(__ull2double, double, 1ull)
  SAME(__int2double_rn(i), double) SAME(__uint2double_rn(1u), double) SAME(__hiloint2double(i, i), double)
  SAME(__double2hiint(d), int) SAME(__double2loint(d), int) SAME(__double_as_longlong(d), LongLong)
  SAME(__longlong_as_double(1ll), double) SAME(__float_as_int(f), int) SAME(__float_as_uint(f), Unsigned)
  SAME(__int_as_float(i), float) SAME(__uint_as_float(1u), float) SAME(__fdividef(f, f), float)
  SAME(__powf(f, f), float) FAST(__cosf) FAST(__exp10f) FAST(__expf) FAST(__frsqrt_rn) FAST(__log10f) FAST(__log2f)
  FAST(__logf) FAST(__saturatef) FAST(__sinf) FAST(__tanf)
  __sincosf(f, &f, &f);
}
