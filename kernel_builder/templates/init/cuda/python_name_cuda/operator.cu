// ${computed} forward and backward on CUDA: element-wise kernels that read each input and write each output once.
//
// The launchers neither allocate memory nor synchronize, so that they can be captured in a CUDA graph.
#include <cuda_runtime.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>

#include "${python_name}_cuda/${operator}.h"

namespace op {
namespace {

constexpr int kThreads = 256;
// More blocks than any GPU runs at a time. For more elements, each thread computes several (grid-stride loop).
constexpr int64_t kMostBlocks = 16384;

template <typename T>
__global__ void forward_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const float value = x[i];
    y[i] = value <= 0.0f ? 0.0f : value;
  }
}

template <typename T>
__global__ void backward_kernel(const T* __restrict__ grad, const T* __restrict__ y, T* __restrict__ grad_x,
                                int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    grad_x[i] = static_cast<float>(y[i]) <= 0.0f ? 0.0f : static_cast<float>(grad[i]);
  }
}

unsigned blocks(int64_t count) {
  return static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMostBlocks));
}

}  // namespace

template <typename T>
int forward(const T* x, T* y, int64_t count, void* stream) {
  forward_kernel<<<blocks(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(x, y, count);
  return cudaGetLastError();
}

template <typename T>
int backward(const T* grad, const T* y, T* grad_x, int64_t count, void* stream) {
  backward_kernel<<<blocks(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(grad, y, grad_x, count);
  return cudaGetLastError();
}

#define INSTANTIATE(T)                                \
  template int forward(const T*, T*, int64_t, void*); \
  template int backward(const T*, const T*, T*, int64_t, void*);
INSTANTIATE(float)
INSTANTIATE(torch::headeronly::Half)
INSTANTIATE(torch::headeronly::BFloat16)

}  // namespace op
