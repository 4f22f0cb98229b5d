// Sums over what blocks have left of each column: what a thread does of the second stage of a sum over rows.
//
// Reads:    the parts, each once: the first stage has just left them in the L2 cache.
// Must not: depend on what is summed.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kit {

constexpr int kPartialWidth = 4;  // columns of a thread

// What is there. Volatile, so that all are on their way before the first is used.
__device__ __forceinline__ void load_predicated(bool there, const float* from, float& value) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.s32 there, %2, 0;\n"
      "@there ld.global.f32 %0, [%1];\n"
      "}\n"
      : "+f"(value)
      : "l"(from), "r"(static_cast<int>(there))
      : "memory");
}
__device__ __forceinline__ void load_predicated(bool there, const float* from, float (&values)[kPartialWidth]) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.s32 there, %5, 0;\n"
      "@there ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+f"(values[0]), "+f"(values[1]), "+f"(values[2]), "+f"(values[3])
      : "l"(from), "r"(static_cast<int>(there))
      : "memory");
}

// Adds every `stride`th part from the one that `from` points into, kBatch of them on their way together, for which the
// kernel must have the registers. Parts are of `hidden` columns, of which `left` are behind `from`, and the next part
// to be added is `step` elements further.
template <int kBatch>
__device__ __forceinline__ void add_partials(const float* from, int64_t step, int first, int stride, int parts,
                                             int64_t hidden, int64_t left, float (&sums)[kPartialWidth]) {
#pragma unroll 1
  for (int part = first; part < parts; part += kBatch * stride) {
    float more[kBatch][kPartialWidth] = {};
    const auto load_all = [&](auto&& load) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        load(part + i * stride < parts, more[i]);
        from += step;
        asm volatile("" : "+l"(from));  // else it is a multiplication for each
      }
    };
    if (hidden % kPartialWidth == 0) {
      load_all([&](bool there, float (&values)[kPartialWidth]) { load_predicated(there, from, values); });
    } else {
      load_all([&](bool there, float (&values)[kPartialWidth]) {
#pragma unroll
        for (int j = 0; j < kPartialWidth; ++j) load_predicated(there && j < left, from + j, values[j]);
      });
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int j = 0; j < kPartialWidth; ++j) sums[j] += more[i][j];
    }
  }
}

}  // namespace kit
