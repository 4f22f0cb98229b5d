// Functions of numbers that CUDA and HIP have beside those of the C library.
#pragma once

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
// Newer C libraries declare functions of these names.
namespace emulator {
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float sinpif(float x) { return static_cast<float>(sin(3.14159265358979323846 * fmod(x, 2.0))); }
inline float cospif(float x) { return static_cast<float>(cos(3.14159265358979323846 * fmod(x, 2.0))); }
}  // namespace emulator
#define rsqrtf emulator::rsqrtf
#define rsqrt emulator::rsqrt
#define sinpif emulator::sinpif
#define cospif emulator::cospif
inline void sincospif(float x, float* sine, float* cosine) { *sine = sinpif(x), *cosine = cospif(x); }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
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
EMULATOR_UNARY(__frcp_rn, 1.0f / x)
EMULATOR_UNARY(__fsqrt_rn, sqrtf(x))
EMULATOR_UNARY(__frsqrt_rn, 1.0f / sqrtf(x))
#undef EMULATOR_UNARY
inline void __sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(nearbyintf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulator::bits<float>(x); }
inline int __float_as_int(float x) { return emulator::bits<int>(x); }
inline long long __double_as_longlong(double x) { return emulator::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator::bits<double>(x); }
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
