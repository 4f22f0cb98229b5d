// Evenly strided rows, and the launches of rows of the tables, for the fast paths.
//
// Reads:    nothing.
// Must not: depend on the operation of a kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "adaln/problem.h"
#include "adaln_cuda/launch_table.h"
#include "kit/division.cuh"
#include "kit/elements.cuh"
#include "kit/launch.cuh"
#include "kit/vectors.cuh"

namespace adaln {

using namespace kit;

// Rows that are evenly strided within a span, of spans that are evenly strided. Strides are in elements.
struct StridedRows {
  const void* data = nullptr;
  int64_t span_stride = 0, row_stride = 0;

  template <typename T>
  __device__ __forceinline__ const T* at(uint32_t span, uint32_t row = 0) const {
    return static_cast<const T*>(data) + (span * span_stride + row * row_stride);
  }
};

// Returns false when the rows are not evenly strided.
inline bool as_strided(const Rows& rows, int64_t span, StridedRows* strided) {
  strided->data = rows.data;
  if (rows.dims <= 1) {
    strided->row_stride = rows.strides[0];
    strided->span_stride = span * rows.strides[0];
    return true;
  }
  strided->row_stride = rows.strides[1];
  strided->span_stride = rows.strides[0];
  return rows.dims == 2 && rows.sizes[1] == span;
}

using kit::aligned;
inline bool aligned(const Modulation& modulation) { return kit::aligned(modulation.rows, bytes_of(modulation.type)); }

// Whether all tensors of a problem can be accessed in vectors.
inline bool all_aligned(const Forward& problem) {
  const int64_t element = bytes_of(problem.type);
  return problem.hidden % (kVectorBytes / element) == 0 && aligned(problem.x, element) &&
         aligned(problem.branch, element) && aligned(problem.gate) && aligned(problem.scale) &&
         aligned(problem.shift) && aligned(problem.weight.data) && aligned(problem.bias.data) &&
         aligned(problem.normed) && aligned(problem.sum);
}
inline bool all_aligned(const Backward& problem) {
  const int64_t element = bytes_of(problem.type);
  return problem.hidden % (kVectorBytes / element) == 0 && aligned(problem.grad, element) &&
         aligned(problem.x, element) && aligned(problem.grad_sum, element) && aligned(problem.branch, element) &&
         aligned(problem.gate) && aligned(problem.scale) && aligned(problem.weight.data) &&
         aligned(problem.bias.data) && aligned(problem.grad_x) && aligned(problem.grad_branch) &&
         aligned(problem.grad_scale) && aligned(problem.grad_gate) && aligned(problem.grad_weight) &&
         aligned(problem.grad_bias);
}

// The arguments that both fast paths of the backward pass share.
struct BackwardRows {
  StridedRows scale, gate;  // of groups; data null where there is none
  const void* weight;
  DynamicType scale_type, gate_type, weight_type;
  void *grad_x, *grad_branch;
  float* partial;
  int sum_count;
  uint32_t group_rows, parts;  // of a group
  int hidden;
  Average average;
  float eps;
  bool centered;
};

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

// Lets `kernel`, whose static shared memory is at most `static_bytes`, use this much dynamic shared memory. The limit
// is the device's: the attribute belongs to the kernel, and other threads may be launching it with more.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel kernel, size_t bytes, size_t static_bytes, const DeviceProperties& device) {
  if (bytes + static_bytes <= kDefaultSharedBytes) return cudaSuccess;
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              device.max_shared_bytes_per_block - static_cast<int>(static_bytes));
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
