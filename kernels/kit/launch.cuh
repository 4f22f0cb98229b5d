// Launch support: dispatch on the dtype, device properties, and programmatic dependent launch (PDL).
//
// Reads:    attributes of the current device and of kernels.
// Must not: depend on the operation of a kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>

#include "kit/platform.cuh"
#include "kit/rows.h"

namespace kit {

template <typename T>
struct Tag {
  using Element = T;
};

// Calls `launch` with the Tag of the dtype and returns the error of its launches.
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

// Sets *device to the current device. With one device in the machine this skips cudaGetDevice.
inline cudaError_t current_device(int* device) {
  static const bool only_one = [] {
    int count;
    return cudaGetDeviceCount(&count) == cudaSuccess && count == 1;
  }();
  *device = 0;
  return only_one ? cudaSuccess : cudaGetDevice(device);
}

// The attributes of a device that launch configurations depend on.
struct DeviceProperties {
  int number;
  int sms;
  int l2_bytes;
  int shared_bytes_per_sm;
  int max_shared_bytes_per_block;
};

// Sets *properties to those of the current device. All devices are queried once, at the first call.
inline cudaError_t current_device_properties(DeviceProperties* properties) {
  constexpr int kMaxDevices = 64;
  struct Devices {
    cudaError_t error;
    int count;
    DeviceProperties properties[kMaxDevices];
  };
  static const Devices devices = [] {
    Devices all{};
    all.error = cudaGetDeviceCount(&all.count);
    all.count = all.count < kMaxDevices ? all.count : kMaxDevices;
    for (int device = 0; device < all.count && all.error == cudaSuccess; ++device) {
      const auto attribute = [&](cudaDeviceAttr which) {
        int value = 0;
        if (all.error == cudaSuccess) all.error = cudaDeviceGetAttribute(&value, which, device);
        return value;
      };
      all.properties[device] = {
          device,
          attribute(cudaDevAttrMultiProcessorCount),
          attribute(cudaDevAttrL2CacheSize),
          attribute(kSharedBytesPerSm),
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
      };
    }
    return all;
  }();
  int device;
  const cudaError_t error = devices.error != cudaSuccess ? devices.error : current_device(&device);
  if (error != cudaSuccess) return error;
  if (device >= devices.count) return cudaErrorInvalidDevice;
  *properties = devices.properties[device];
  return cudaSuccess;
}

// Shared memory of a block that is not dynamic: at most 1 KiB of static memory, and the 1 KiB that CUDA reserves.
constexpr int kReservedBytes = 2048;

// Allows a kernel all remaining shared memory of an SM; `known` has a bit for each device on which this is done. It is
// state of the kernel, not of a launch: a thread that allowed less for its own call would break another thread's
// launch.
template <typename Kernel>
void allow_shared_memory(Kernel kernel, const DeviceProperties& device, std::atomic<uint64_t>& known) {
  const uint64_t bit = device.number < 64 ? uint64_t{1} << device.number : 0;
  if ((known.load(std::memory_order_relaxed) & bit) == 0 &&
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           device.shared_bytes_per_sm - kReservedBytes) == cudaSuccess) {
    known.fetch_or(bit, std::memory_order_relaxed);
  }
}

// PDL, from capability 9.0 on: blocks of a kernel launched by `launch_with_pdl` may start while the previous kernel of
// the stream is still running, which hides launch latency. Every thread calls `grid_wait` before it loads or stores
// global memory; the wait returns when the previous kernel has completed and its stores are visible. When every block
// has called `trigger_next_grid` or exited, the next kernel may start, and its own `grid_wait` keeps it correct.

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

// A kernel to ask the runtime about. All kernels of a library are compiled for the same capabilities.
template <typename = void>
__global__ void empty_kernel() {}

#if defined(USE_ROCM)

// No row of a launch table is for AMD GPUs only: they take those that are for all capabilities.
inline int compiled_capability() { return 0; }

// Unlike cudaError_t, hipError_t must not be ignored, unless that is marked.
#pragma clang diagnostic ignored "-Wunused-value"

// AMD GPUs start a kernel when the previous one has ended, and have no clusters.
template <typename... Parameters>
cudaError_t launch_clusters_with_pdl(void (*kernel)(Parameters...), dim3 blocks, dim3, dim3 threads,
                                     size_t shared_bytes, cudaStream_t stream, Parameters... parameters) {
  hipLaunchKernelGGL(kernel, blocks, threads, shared_bytes, stream, parameters...);
  return cudaPeekAtLastError();
}

#else

// Returns the capability that the code running on the current device was compiled for, e.g. 90; for JIT-compiled PTX
// that of the PTX. 0 if unknown. The answer is cached per device.
inline int compiled_capability() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // 0: not yet known
  int device;
  if (current_device(&device) != cudaSuccess || device >= kDevices) return 0;
  int capability = known[device].load(std::memory_order_relaxed);
  if (capability == 0) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, empty_kernel<>) != cudaSuccess) return 0;
    capability = attributes.ptxVersion;
    known[device].store(capability, std::memory_order_relaxed);
  }
  return capability;
}

// Launches a kernel that calls `grid_wait`, in clusters of blocks; clusters of several are for capability 9.0 and
// later. A launch error is also left for cudaGetLastError.
template <typename... Parameters>
cudaError_t launch_clusters_with_pdl(void (*kernel)(Parameters...), dim3 blocks, dim3 cluster, dim3 threads,
                                     size_t shared_bytes, cudaStream_t stream, Parameters... parameters) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster.x, cluster.y, cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  // Code for less than 9.0 has no grid wait, so it must not start early.
  config.numAttrs = compiled_capability() < 90 ? 0 : cluster.x * cluster.y * cluster.z == 1 ? 1 : 2;
  void* arguments[] = {&parameters...};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

#endif

// The same without clusters.
template <typename... Parameters>
cudaError_t launch_with_pdl(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes,
                            cudaStream_t stream, Parameters... parameters) {
  return launch_clusters_with_pdl(kernel, blocks, dim3(1), threads, shared_bytes, stream, parameters...);
}

}  // namespace kit
