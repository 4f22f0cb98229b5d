// Launches of rows of the tables, and the shared memory that they may have.
//
// Reads:    nothing.
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

// Lets `kernel` use this much dynamic shared memory. `static_bytes` bounds its static shared memory, which counts as
// well.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel kernel, size_t bytes, size_t static_bytes) {
  if (bytes + static_bytes <= kDefaultSharedBytes) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

// Whether a call that moves this many bytes prefetches its input into the L2 cache during the preceding kernel.
inline bool prefetch_pays(const DeviceProperties& device, int64_t bytes_moved) {
  return bytes_moved > device.l2_bytes / kPrefetchL2Divisor;
}

// Calls `launch` with a row of a table as a template argument, and returns its error.
template <const auto& kTable, unsigned kDtypes = kEveryDtype, typename Launch>
cudaError_t launch_row(int row, const Launch& launch) {
  cudaError_t error = cudaErrorInvalidConfiguration;
  with_row<kTable, kDtypes>(row, [&](auto index) { error = launch(index); });
  return error;
}

}  // namespace adaln
