// Unaligned rows: vectorized loads of rows whose length is no multiple of a vector.
//
// Consecutive rows have different misalignments, which repeat after `period` rows. A block that takes every period-th
// row (or every multiple) sees one misalignment: each of its threads meets the same columns in every row and can keep
// sums of them in registers. The first and the last vector of a row also hold elements of the neighbouring rows.
//
// Reads:    nothing of its own; the callers pass the addresses.
// Must not: depend on what a kernel computes; read past the end of a tensor. Reading the vector that holds a tensor's
//           first element is allowed: an allocation is 16-byte aligned, so the vector lies inside it.
#pragma once

#include <cstdint>
#include <numeric>

#include "kit/async_copy.cuh"
#include "kit/rows.h"

namespace kit {

// The number of rows after which the misalignment repeats, for vectors of `width` elements. A power of two.
inline int64_t alignment_period(int64_t hidden, int width) { return width / std::gcd(hidden, int64_t{width}); }

// Returns whether each row has the same misalignment as that row of `like`, a contiguous tensor. True if the tensor of
// `rows` is absent.
inline bool same_alignment(const Rows& rows, const void* like, int64_t hidden, int64_t element) {
  const auto distance = reinterpret_cast<uintptr_t>(rows.data) - reinterpret_cast<uintptr_t>(like);
  if (rows.data == nullptr) return true;
  const bool same_step = rows.dims == 0 || (rows.strides[0] - hidden) * element % kVectorBytes == 0;
  return rows.dims <= 1 && distance % kVectorBytes == 0 && same_step;
}

// Copies the first `bytes` bytes of a word, an even number, to shared memory and fills the rest with zeros. For the end
// of a tensor, where the whole word must not be read.
template <typename Word>
__device__ __forceinline__ void copy_zero_filled(SharedAddress to, const void* from, uint32_t bytes) {
  auto* const halves = shared_pointer<uint16_t>(to);
#pragma unroll 1
  for (uint32_t i = 0; i < sizeof(Word) / 2; ++i) {
    halves[i] = 2 * i < bytes ? static_cast<const uint16_t*>(from)[i] : uint16_t{0};
  }
}

}  // namespace kit
