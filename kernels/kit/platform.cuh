// Differences of CUDA and HIP: launch attributes, warps, barriers, and values that the compiler must not see
// through.
//
// Reads:    registers of a warp or a block.
// Must not: depend on the operation of a kernel.
//
// For ROCm, hipify translates the sources; code that it cannot translate is here, and in the functions of the other
// files that load and store by inline assembly. Code for ROCm is compiled and checked, and has not run on an AMD GPU.
//
// A warp is 32 lanes everywhere. The wavefronts of AMD GPUs have 32 or 64 lanes, and one of 64 holds two warps:
// shuffles stay within 32 neighbouring lanes, and nothing depends on the other lanes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kit {

constexpr int kWarp = 32;

#if defined(USE_ROCM)

// Kernel arguments are constants on AMD GPUs, without an attribute.
#define __grid_constant__

// The second argument of __launch_bounds__ counts blocks in CUDA, and wavefronts in HIP.
#define LAUNCH_BOUNDS(threads, ...) __launch_bounds__(threads)

// The shared memory of a block: two compute units together have more on some GPUs.
constexpr auto kSharedBytesPerSm = cudaDevAttrMaxSharedMemoryPerBlock;

template <typename Value>
__device__ __forceinline__ Value shuffle_xor(Value value, int mask) {
  return __shfl_xor(value, mask, kWarp);
}

// By shuffles: a vote counts all lanes of a wavefront.
__device__ __forceinline__ bool any_lane(bool value) {
  int any = value ? 1 : 0;
  for (int mask = kWarp / 2; mask > 0; mask /= 2) any |= shuffle_xor(any, mask);
  return any != 0;
}

// There are no named barriers, so all threads of the block have to take part.
constexpr bool kHasNamedBarriers = false;
__device__ __forceinline__ void synchronize_warps(int, int) { __syncthreads(); }

template <typename... Values>
__device__ __forceinline__ void hide(Values&...) {}

__device__ __forceinline__ float exp2_approximate(float x) { return exp2f(x); }

#else

constexpr unsigned kAllLanes = 0xffffffffu;

#define LAUNCH_BOUNDS(threads, ...) __launch_bounds__(threads, __VA_ARGS__)

constexpr auto kSharedBytesPerSm = cudaDevAttrMaxSharedMemoryPerMultiprocessor;

template <typename Value>
__device__ __forceinline__ Value shuffle_xor(Value value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}

__device__ __forceinline__ bool any_lane(bool value) { return __any_sync(kAllLanes, value); }

// Synchronizes the warps of a group with `threads` threads, by a named barrier. Barrier 0 is that of __syncthreads.
constexpr bool kHasNamedBarriers = true;
__device__ __forceinline__ void synchronize_warps(int group, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(threads) : "memory");
}

// Hides values from the compiler.
__device__ __forceinline__ void hide(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void hide(uint2& word) { asm volatile("" : "+r"(word.x), "+r"(word.y)); }
__device__ __forceinline__ void hide(uint4& word) {
  asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
}
__device__ __forceinline__ void hide(const float*& pointer) { asm volatile("" : "+l"(pointer)); }
__device__ __forceinline__ void hide(const float*& pointer, int64_t& step) {
  asm volatile("" : "+l"(pointer), "+l"(step));
}

// 2^x, in one instruction.
__device__ __forceinline__ float exp2_approximate(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

#endif

// Returns the rows that a block can have when the threads of each row synchronize by themselves: where a barrier is
// that of the block, one row of several warps.
__host__ __device__ constexpr int rows_with_barriers(int rows, int threads_of_row) {
  return kHasNamedBarriers || threads_of_row <= kWarp ? rows : 1;
}

}  // namespace kit
