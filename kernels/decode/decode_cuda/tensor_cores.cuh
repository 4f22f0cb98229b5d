// Products of 16-bit matrices on tensor cores, from capability 8.0 on.
//
// Reads:    nothing.
// Must not: depend on the operation of a kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace decode_step {

// sums += a * b: a is 16 x 16, b 16 x 8, each thread's part as `mma.m16n8k16` has it. Lane 4 * g + t has of `a`, in
// rows g (low) and g + 8 (high), columns 2 * t and 2 * t + 1 (0) and those eight later (1); of b, in column g, the same
// rows; of the sums, in rows g (0, 1) and g + 8 (2, 3), columns 2 * t and 2 * t + 1.
template <typename T>
__device__ __forceinline__ void multiply([[maybe_unused]] float (&sums)[4], [[maybe_unused]] uint32_t low0,
                                         [[maybe_unused]] uint32_t high0, [[maybe_unused]] uint32_t low1,
                                         [[maybe_unused]] uint32_t high1, [[maybe_unused]] uint32_t b0,
                                         [[maybe_unused]] uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(low0), "r"(high0), "r"(low1), "r"(high1), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(low0), "r"(high0), "r"(low1), "r"(high1), "r"(b0), "r"(b1));
  }
#endif
}

// Rounds two numbers to T, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 rounded = __floats2half2_rn(low, high);
    memcpy(&pair, &rounded, sizeof(pair));
  } else {
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(low, high);
    memcpy(&pair, &rounded, sizeof(pair));
  }
  return pair;
}

__device__ __forceinline__ uint32_t word_at(const uint4& vector, int i) {
  return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}

}  // namespace decode_step
