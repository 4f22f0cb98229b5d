// What launches share: the element type as a template argument, the size of the device, and how a kernel begins before
// the one in front of it has ended.
//
// Reads:    attributes of the current device and of kernels.
// Must not: depend on what a kernel computes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>

#include "kit/rows.h"

namespace kit {

template <typename T>
struct Tag {
  using Element = T;
};

// Calls `launch` with a Tag of the element type, and returns the error of what it launched.
template <typename Launch>
cudaError_t dispatch_dtype(Type type, Launch&& launch) {
  switch (type) {
    case Type::float32:
      launch(Tag<float>{});
      break;
    case Type::float16:
      launch(Tag<__half>{});
      break;
    case Type::bfloat16:
      launch(Tag<__nv_bfloat16>{});
      break;
  }
  return cudaGetLastError();
}

// The current device, as cudaGetDevice says, which need not be asked where there is only one.
inline cudaError_t current_device(int* device) {
  static const bool only_one = [] {
    int count;
    return cudaGetDeviceCount(&count) == cudaSuccess && count == 1;
  }();
  *device = 0;
  return only_one ? cudaSuccess : cudaGetDevice(device);
}

inline cudaError_t sm_count(int* processors) {
  int device;
  const cudaError_t error = current_device(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device);
}

// From capability 9.0 on, the blocks of a kernel that `launch_with_pdl` started may begin while the kernel in front of
// it in the stream ends, which hides the time that a launch takes. Every thread must call `grid_wait` before it reads
// or writes global memory; it returns when that kernel is done and its results are visible. Once all blocks have called
// `trigger_next_grid`, or ended, the next kernel may begin in turn, and it waits by itself.

__device__ __forceinline__ void grid_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void trigger_next_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The architecture that the code on the current device was compiled for, such as 90: that of PTX, where it comes from
// PTX for an older one. 0 if that cannot be told. All kernels of a library are compiled for the same ones, so that one
// of them speaks for all.
inline int compiled_capability(const void* kernel) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // 0: not yet known
  int device;
  if (current_device(&device) != cudaSuccess || device >= kDevices) return 0;
  int architecture = known[device].load(std::memory_order_relaxed);
  if (architecture == 0) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return 0;
    architecture = attributes.ptxVersion;
    known[device].store(architecture, std::memory_order_relaxed);
  }
  return architecture;
}

// Launches a kernel that calls `grid_wait`. An error is what cudaGetLastError returns afterwards, too.
template <typename... Parameters>
cudaError_t launch_with_pdl(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes,
                            cudaStream_t stream, Parameters... parameters) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = compiled_capability(reinterpret_cast<const void*>(kernel)) >= 90 ? 1 : 0;  // else it does not wait
  void* arguments[] = {&parameters...};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

}  // namespace kit
