// The machine code of kernels.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace aot {

constexpr int kDevices = 64;

// A cubin of a kernel, or PTX for GPUs from a capability on.
struct Image {
  int capability;  // 90 for 9.0
  bool is_ptx;
  const void* data;
  unsigned shared;  // bytes of shared memory
  int64_t scratch;  // bytes of global memory for each block
};

// A kernel in all its images, which are ascending by capability.
struct Kernel {
  const char* name;
  unsigned threads;
  const Image* images;
  int count;
  // For each device: the image and the loaded kernel; null before the first launch there.
  const Image* chosen[kDevices];
  std::atomic<CUkernel> loaded[kDevices];
};

}  // namespace aot
