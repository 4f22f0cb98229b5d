// Second stage of a two-stage reduction over rows: the blocks' partial sums, added up in a fixed order.
//
// Reads:    the partial sums, each once; they are L2-resident, since the first stage has just written them.
// Writes:   their sums.
// Must not: depend on the summands, or use atomics: equal inputs give equal bits.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kit/elements.cuh"
#include "kit/launch.cuh"

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

// A vector that is summed over `parts`.
struct PartialSums {
  const float* partial;  // [parts, elements]; null: not requested
  int64_t elements;
  void* to;
  Type type;  // of `to`
};
template <int kCount>
struct Reductions {
  PartialSums sums[kCount];
  int parts;
};

// blockIdx.y: the vector. A block has kDown rows of kAcross threads and reduces kAcross * kPartialWidth columns: first
// each row of threads adds some of the parts, then one thread per column adds the sums of the warps. Most of the time
// is launch latency, so as little work as possible follows the grid wait. kBatch: parts that a thread loads at a time.
template <int kAcross, int kDown, int kBatch, int kCount>
__global__ void LAUNCH_BOUNDS(kAcross* kDown, 1) reduce_kernel(const __grid_constant__ Reductions<kCount> problem) {
  constexpr int kThreads = kAcross * kDown, kColumns = kAcross * kPartialWidth;
  __shared__ alignas(16) float warp_sums[kThreads / kWarp][kColumns];
  const PartialSums& own = problem.sums[kCount == 1 ? 0 : blockIdx.y];
  const int across = threadIdx.x % kAcross * kPartialWidth, row = threadIdx.x / kAcross;
  const int64_t elements = own.elements, first_column = static_cast<int64_t>(blockIdx.x) * kColumns;
  const int64_t columns_left = elements - first_column - across;
  const float* from = own.partial + row * elements + first_column + across;
  int64_t step = kDown * elements;
  trigger_next_grid();
  hide(from, step);  // computed before the wait
  grid_wait();
  if (kCount > 1 && own.partial == nullptr) return;
  float sums[kPartialWidth] = {};
  if (columns_left > 0) add_partials<kBatch>(from, step, row, kDown, problem.parts, elements, columns_left, sums);
#pragma unroll
  for (int distance = kAcross; distance < kWarp; distance *= 2) {
#pragma unroll
    for (int j = 0; j < kPartialWidth; ++j) sums[j] += shuffle_xor(sums[j], distance);
  }
  if (threadIdx.x % kWarp < kAcross) {
    *reinterpret_cast<float4*>(&warp_sums[threadIdx.x / kWarp][across]) =
        make_float4(sums[0], sums[1], sums[2], sums[3]);
  }
  __syncthreads();
  if (threadIdx.x >= kColumns || first_column + threadIdx.x >= elements) return;
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) sum += warp_sums[warp][threadIdx.x];
  store_as(own.type, own.to, first_column + threadIdx.x, sum);
}

// Launches nothing if no vector is requested.
template <int kAcross, int kDown, int kBatch, int kCount>
cudaError_t launch_reductions(const Reductions<kCount>& problem, cudaStream_t stream) {
  constexpr int kColumns = kAcross * kPartialWidth;
  int64_t most = 0;
  for (const PartialSums& sums : problem.sums) most = std::max(most, sums.partial == nullptr ? 0 : sums.elements);
  const auto blocks = static_cast<unsigned>((most + kColumns - 1) / kColumns);
  if (blocks == 0) return cudaSuccess;
  return launch_with_pdl(reduce_kernel<kAcross, kDown, kBatch, kCount>, dim3(blocks, kCount), kAcross * kDown, 0,
                         stream, problem);
}

}  // namespace kit
