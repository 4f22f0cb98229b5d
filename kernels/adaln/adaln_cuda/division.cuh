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

namespace adaln {

// Integer division by multiplication. Dividend and divisor are below 2^31.
class Divider {
 public:
  explicit Divider(uint32_t divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    if ((uint64_t{1} << shift_) == divisor) return;
    const uint32_t power = 31 + shift_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << power) + divisor - 1) / divisor);
    shift_ = power - 32;
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t number) const {
    return (multiplier_ == 0 ? number : __umulhi(number, multiplier_)) >> shift_;
  }

 private:
  uint32_t multiplier_ = 0, shift_ = 0;
};

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

}  // namespace adaln
