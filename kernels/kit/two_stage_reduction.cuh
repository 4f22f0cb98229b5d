// Second stage of a two-stage reduction over rows: one thread's share of adding the blocks' partial sums.
//
// Reads:    the partial sums, each once; they are L2-resident, since the first stage has just written them.
// Must not: depend on the summands.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kit/platform.cuh"

namespace kit {

constexpr int kPartialWidth = 4;  // columns per thread

// Loads if `in_range`, else leaves the value. The assembly is volatile so that the compiler issues all loads of a batch
// before it uses the first.
#if defined(USE_ROCM)
__device__ __forceinline__ void load_predicated(bool in_range, const float* from, float& value) {
  if (in_range) value = *from;
}
__device__ __forceinline__ void load_predicated(bool in_range, const float* from, float (&values)[kPartialWidth]) {
  if (!in_range) return;
  const float4 four = *reinterpret_cast<const float4*>(from);
  values[0] = four.x;
  values[1] = four.y;
  values[2] = four.z;
  values[3] = four.w;
}
#else
__device__ __forceinline__ void load_predicated(bool in_range, const float* from, float& value) {
  asm volatile(
      "{\n"
      ".reg .pred in_range;\n"
      "setp.ne.s32 in_range, %2, 0;\n"
      "@in_range ld.global.f32 %0, [%1];\n"
      "}\n"
      : "+f"(value)
      : "l"(from), "r"(static_cast<int>(in_range))
      : "memory");
}
__device__ __forceinline__ void load_predicated(bool in_range, const float* from, float (&values)[kPartialWidth]) {
  asm volatile(
      "{\n"
      ".reg .pred in_range;\n"
      "setp.ne.s32 in_range, %5, 0;\n"
      "@in_range ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+f"(values[0]), "+f"(values[1]), "+f"(values[2]), "+f"(values[3])
      : "l"(from), "r"(static_cast<int>(in_range))
      : "memory");
}
#endif

// Adds parts `first`, `first + stride`, ... below `parts` to `sums`. A part is one block's partial sums of all `hidden`
// columns. `from` points to this thread's first column in part `first`, with `columns_left` columns from there to the
// end of the part; `step` is the distance in elements to the next part to add. kBatch loads are in flight at a time;
// the kernel needs kBatch * kPartialWidth registers for them.
template <int kBatch>
__device__ __forceinline__ void add_partials(const float* from, int64_t step, int first, int stride, int parts,
                                             int64_t hidden, int64_t columns_left, float (&sums)[kPartialWidth]) {
#pragma unroll 1
  for (int part = first; part < parts; part += kBatch * stride) {
    float more[kBatch][kPartialWidth] = {};
    const auto load_all = [&](auto&& load) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        load(part + i * stride < parts, more[i]);
        from += step;
        hide(from);  // else nvcc computes each address by a multiplication
      }
    };
    if (hidden % kPartialWidth == 0) {
      load_all([&](bool in_range, float (&values)[kPartialWidth]) { load_predicated(in_range, from, values); });
    } else {
      load_all([&](bool in_range, float (&values)[kPartialWidth]) {
#pragma unroll
        for (int j = 0; j < kPartialWidth; ++j) load_predicated(in_range && j < columns_left, from + j, values[j]);
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
