// Divisions by numbers that are known before the launch, prepared on the host.
//
// Reads:    nothing.
// Must not: depend on the operation of a kernel.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace kit {

// Divides numbers below 2^31 by a run-time constant with one multiplication and a shift.
struct FastDivisor {
  uint32_t value, factor, shift;

  __device__ __forceinline__ uint32_t operator()(uint32_t number) const {
    return (__umulhi(number, factor) + number) >> shift;
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t number, uint32_t& rest) const {
    const uint32_t quotient = (*this)(number);
    rest = number - quotient * value;
    return quotient;
  }
};

// Returns the divisor for `number`, or for 1 if that is 0.
inline FastDivisor fast_divisor(int64_t number) {
  FastDivisor result{static_cast<uint32_t>(std::max<int64_t>(number, 1)), 0, 0};
  while ((uint64_t{1} << result.shift) < result.value) ++result.shift;
  const uint64_t above = (uint64_t{1} << result.shift) - result.value;
  result.factor = static_cast<uint32_t>((above << 32) / result.value + 1);
  return result;
}

// Divides a sum by its count. The reciprocal is stored in two parts, so that the quotient is as accurate as a division.
// Both parts are positive, so that an infinite sum stays infinite.
class Average {
 public:
  explicit Average(int64_t count) {
    const double reciprocal = 1.0 / static_cast<double>(count);
    high_ = static_cast<float>(reciprocal);
    if (static_cast<double>(high_) > reciprocal) high_ = std::nextafter(high_, 0.0f);
    low_ = std::max(static_cast<float>(reciprocal - static_cast<double>(high_)), std::numeric_limits<float>::min());
  }
  __device__ __forceinline__ float operator()(float sum) const { return sum * high_ + sum * low_; }

 private:
  float high_, low_;
};

}  // namespace kit
