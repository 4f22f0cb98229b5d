// Additions that HIP 6.0 headers need with clang 22 and HIP 7.1. Each source begins with this file.
#pragma once

// AMD's clang of ROCm 7.1 still defines it. Kernels use it, too.
#if !defined(__HIP_DEVICE_COMPILE__) || defined(__GFX9__)
#define __AMDGCN_WAVEFRONT_SIZE 64
#else
#define __AMDGCN_WAVEFRONT_SIZE 32
#endif

#include <hip/hip_runtime.h>

// hip_bf16.h of 6.0 defines these without `inline`, so two sources of a binary could not include it. A function that is
// declared inline before its definition is inline.
struct __hip_bfloat16;
struct __hip_bfloat162;
__host__ __device__ inline __hip_bfloat16 __float2bfloat16(float);
__host__ __device__ inline float2 __bfloat1622float2(const __hip_bfloat162);
__host__ __device__ inline __hip_bfloat16 __double2bfloat16(const double);
__host__ __device__ inline __hip_bfloat162 __float22bfloat162_rn(const float2);
__host__ __device__ inline float __high2float(const __hip_bfloat162);
__host__ __device__ inline float __low2float(const __hip_bfloat162);
