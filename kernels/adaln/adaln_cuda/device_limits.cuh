// Limits of the current device: shared memory and the size of its L2 cache.
//
// Reads:    attributes of the current device.
// Must not: depend on the operation of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adaln_cuda/launch_table.h"
#include "kit/launch.cuh"

namespace adaln {

using namespace kit;

// The capability that the surrounding device code is compiled for. A kernel for a family of GPUs is empty in the code
// for others, so that the package does not grow.
#if defined(__CUDA_ARCH__)
constexpr int kCodeCapability = __CUDA_ARCH__ / 10;
#else
constexpr int kCodeCapability = 0;
#endif
template <const auto& kTable, int kRow>
constexpr bool kInThisCode = kTable[kRow].capabilities.has(kCodeCapability);

// Static shared memory of the forward kernels, at most.
constexpr size_t kStaticSharedBytes = 1024;

// A kernel that uses more shared memory than this needs cudaFuncAttributeMaxDynamicSharedMemorySize.
constexpr size_t kDefaultSharedBytes = 48 * 1024;

// Returns 0 when the attribute cannot be read.
inline size_t device_attribute(cudaDeviceAttr attribute) {
  int device, value;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? static_cast<size_t>(value) : 0;
}
inline size_t shared_bytes_per_sm() { return device_attribute(kSharedBytesPerSm); }
inline size_t max_shared_bytes_per_block() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Lets `kernel` use this much dynamic shared memory. `static_bytes` bounds its static shared memory, which counts as
// well.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel kernel, size_t bytes, size_t static_bytes) {
  if (bytes + static_bytes <= kDefaultSharedBytes) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

// Whether a call that moves this many bytes prefetches its input into the L2 cache during the preceding kernel.
inline bool prefetch_pays(int64_t bytes_moved) {
  const auto l2_bytes = static_cast<int64_t>(device_attribute(cudaDevAttrL2CacheSize));
  return bytes_moved > l2_bytes / kPrefetchL2Divisor;
}

// Calls `launch` with a row of a table as a template argument, and returns its error.
template <const auto& kTable, unsigned kDtypes = kEveryDtype, typename Launch>
cudaError_t launch_row(int row, const Launch& launch) {
  cudaError_t error = cudaErrorInvalidConfiguration;
  with_row<kTable, kDtypes>(row, [&](auto index) { error = launch(index); });
  return error;
}

}  // namespace adaln
