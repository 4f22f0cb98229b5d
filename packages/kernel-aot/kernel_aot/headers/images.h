// The machine code of kernels.
#pragma once

#ifdef USE_ROCM
#include <hip/hip_runtime_api.h>
#else
#include <cuda.h>
#include <cuda_runtime_api.h>
#endif

#include <atomic>
#include <cstdint>

namespace aot {

#ifdef USE_ROCM
using Function = hipFunction_t;
#else
using Function = CUkernel;
#endif

constexpr int kDevices = 64;

// Machine code of a kernel, or PTX for GPUs from a capability on. Warps have 64 threads on some GPUs of AMD.
struct Image {
  int capability;  // 90 for 9.0, and 0x942 for gfx942
  bool is_ptx;
  const void* data;
  const char* name;
  unsigned threads;  // of a block; 0 if host code of CuTe DSL configures launches
  unsigned shared;   // bytes of shared memory
  int64_t scratch;   // bytes of global memory for each block
};

// A kernel in all its images, which are ascending by capability.
struct Kernel {
  bool prefer_shared;  // rather than L1, where blocks need more than 48 KiB
  const Image* images;
  int count;
  // For each device: the image and the loaded kernel; null before the first launch there.
  const Image* chosen[kDevices];
  std::atomic<Function> loaded[kDevices];
};

}  // namespace aot
