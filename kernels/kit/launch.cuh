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
cudaError_t with_type(Type type, Launch&& launch) {
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

inline cudaError_t processors_of_device(int* processors) {
  int device;
  const cudaError_t error = current_device(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device);
}

// From capability 9.0 on, the blocks of a kernel that `launch_early` started may begin while the kernel in front of it
// in the stream ends, which hides the time that a launch takes. Every thread must call `wait_for_previous` before it
// reads or writes global memory; it returns when that kernel is done and its results are visible. Once all blocks have
// called `let_next_begin`, or ended, the next kernel may begin in turn, and it waits by itself.

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether the code that runs on the current device waits: not where it comes from PTX for an older capability. All
// kernels of a library are compiled for the same ones, so that one of them speaks for all.
inline bool waits_for_previous(const void* kernel) {
  constexpr int kDevices = 64;
  static std::atomic<signed char> known[kDevices];  // 0: not yet known, 1: it waits, -1: it does not
  int device;
  if (current_device(&device) != cudaSuccess || device >= kDevices) return false;
  signed char waits = known[device].load(std::memory_order_relaxed);
  if (waits == 0) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return false;
    waits = attributes.ptxVersion >= 90 ? 1 : -1;
    known[device].store(waits, std::memory_order_relaxed);
  }
  return waits > 0;
}

// Launches a kernel that calls `wait_for_previous`. An error is what cudaGetLastError returns afterwards, too.
template <typename... Parameters>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes,
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
  config.numAttrs = waits_for_previous(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
  void* arguments[] = {&parameters...};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

}  // namespace kit
