// `max` and `min` of the global namespace for host code. nvcc's headers declare them for both sides, and clang's for
// the device alone. The types are those of crt/math_functions.hpp.
#pragma once

#define KERNEL_HOST_MAX_MIN(A, B, RESULT)                                                                     \
  static inline __attribute__((host)) RESULT max(const A a, const B b) {                                      \
    return static_cast<RESULT>(a) < static_cast<RESULT>(b) ? static_cast<RESULT>(b) : static_cast<RESULT>(a); \
  }                                                                                                           \
  static inline __attribute__((host)) RESULT min(const A a, const B b) {                                      \
    return static_cast<RESULT>(b) < static_cast<RESULT>(a) ? static_cast<RESULT>(b) : static_cast<RESULT>(a); \
  }
#define KERNEL_HOST_MAX_MIN_OF(SIGNED, UNSIGNED)  \
  KERNEL_HOST_MAX_MIN(SIGNED, SIGNED, SIGNED)     \
  KERNEL_HOST_MAX_MIN(SIGNED, UNSIGNED, UNSIGNED) \
  KERNEL_HOST_MAX_MIN(UNSIGNED, SIGNED, UNSIGNED) \
  KERNEL_HOST_MAX_MIN(UNSIGNED, UNSIGNED, UNSIGNED)

KERNEL_HOST_MAX_MIN_OF(int, unsigned int)
KERNEL_HOST_MAX_MIN_OF(long int, unsigned long int)
KERNEL_HOST_MAX_MIN_OF(long long int, unsigned long long int)
KERNEL_HOST_MAX_MIN(float, float, float)
KERNEL_HOST_MAX_MIN(float, double, double)
KERNEL_HOST_MAX_MIN(double, float, double)
KERNEL_HOST_MAX_MIN(double, double, double)

#undef KERNEL_HOST_MAX_MIN_OF
#undef KERNEL_HOST_MAX_MIN
