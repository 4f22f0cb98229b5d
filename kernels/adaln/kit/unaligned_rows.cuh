// Rows of a length that is no multiple of a vector, read in vectors all the same.
//
// Such rows begin at another place of a vector each time; after `period` of them they lie as before. A block that takes
// every period-th row, or every multiple of that, finds the same columns in the same vectors of each of its rows, so
// that each thread can keep sums of its columns. A row's first and last vector hold elements of its neighbours, too.
//
// Reads:    nothing.
// Must not: depend on what a kernel computes; read behind a tensor. In front of its first element it may: what a vector
//           holds there is part of the same allocation.
#pragma once

#include <cstdint>
#include <numeric>

#include "kit/async_copy.cuh"
#include "kit/rows.h"

namespace kit {

// After how many rows vectors of `width` elements lie as before. A power of two.
inline int64_t alignment_period(int64_t hidden, int width) { return width / std::gcd(hidden, int64_t{width}); }

// Whether each row begins at the same place of a vector as the row of `like`, rows one behind the other. True when
// there is no such tensor.
inline bool same_alignment(const Rows& rows, const void* like, int64_t hidden, int64_t element) {
  const auto distance = reinterpret_cast<uintptr_t>(rows.data) - reinterpret_cast<uintptr_t>(like);
  if (rows.data == nullptr) return true;
  const bool steps_alike = rows.dims == 0 || (rows.strides[0] - hidden) * element % kVectorBytes == 0;
  return rows.dims <= 1 && distance % kVectorBytes == 0 && steps_alike;
}

// Puts the first `bytes` of a word, an even number, into shared memory, and zeros behind them, where the word itself
// may not be read: at the end of a tensor.
template <typename Word>
__device__ __forceinline__ void copy_zero_filled(uint32_t to, const void* from, uint32_t bytes) {
  auto* const halves = static_cast<uint16_t*>(__cvta_shared_to_generic(to));
#pragma unroll 1
  for (uint32_t i = 0; i < sizeof(Word) / 2; ++i) {
    halves[i] = 2 * i < bytes ? static_cast<const uint16_t*>(from)[i] : uint16_t{0};
  }
}

}  // namespace kit
