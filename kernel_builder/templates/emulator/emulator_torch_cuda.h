// Torch's own functions for CUDA, for bindings on the full C++ ABI.
#pragma once

#include <c10/util/Exception.h>

#include "emulator.h"

namespace c10::cuda {
struct CUDAStream {
  cudaStream_t stream() const { return nullptr; }
  operator cudaStream_t() const { return nullptr; }
};
inline CUDAStream getCurrentCUDAStream(int = -1) { return {}; }
struct CUDAGuard {
  template <typename Device>
  explicit CUDAGuard(Device) {}
};
using OptionalCUDAGuard = CUDAGuard;
}  // namespace c10::cuda

namespace at::cuda {
using c10::cuda::CUDAGuard;
using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;
using c10::cuda::OptionalCUDAGuard;
inline cudaDeviceProp* getCurrentDeviceProperties() {
  static cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, 0);
  return &properties;
}
}  // namespace at::cuda

#define C10_CUDA_CHECK(call)                                                \
  do {                                                                      \
    const cudaError_t error = call;                                         \
    TORCH_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error)); \
  } while (false)
#define AT_CUDA_CHECK(call) C10_CUDA_CHECK(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() C10_CUDA_CHECK(cudaGetLastError())
