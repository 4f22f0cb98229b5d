// Limits of the current device: shared memory and the size of its L2 cache.
//
// Reads:    attributes of the current device.
// Must not: depend on what a kernel computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "adaln_cuda/launch_table.h"
#include "kit/launch.cuh"

namespace adaln {

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
inline size_t shared_bytes_per_sm() { return device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor); }
inline size_t max_shared_bytes_per_block() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Lets `kernel` use this much dynamic shared memory. `static_bytes` bounds its static shared memory, which counts as
// well.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel kernel, size_t bytes, size_t static_bytes) {
  if (bytes + static_bytes <= kDefaultSharedBytes) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// Whether a call that moves this many bytes prefetches its input into the L2 cache during the preceding kernel.
inline bool prefetch_pays(int64_t bytes_moved) {
  const auto l2_bytes = static_cast<int64_t>(device_attribute(cudaDevAttrL2CacheSize));
  return bytes_moved > l2_bytes / kPrefetchL2Divisor;
}

// Calls `launch` with std::integral_constant of `row`, which makes a table's row a template argument.
template <typename Launch, int... kRows>
cudaError_t with_row(int row, Launch&& launch, std::integer_sequence<int, kRows...>) {
  cudaError_t error = cudaErrorInvalidConfiguration;
  ((row == kRows ? void(error = launch(std::integral_constant<int, kRows>{})) : void()), ...);
  return error;
}
template <typename Row, int kCount, typename Launch>
cudaError_t with_row(const Row (&)[kCount], int row, Launch&& launch) {
  return with_row(row, launch, std::make_integer_sequence<int, kCount>{});
}

}  // namespace adaln
