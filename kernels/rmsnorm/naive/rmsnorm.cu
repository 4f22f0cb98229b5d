// RMSNorm, forward: the readable statement of `rms_norm`.
//
//   normed[row][column] = x[row][column] / sqrt(mean(x[row]^2) + eps) * weight[column]
//
// Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), https://arxiv.org/abs/1910.07467.
//
// x and normed are [rows, hidden], weight is [hidden], all contiguous and of one dtype. The arithmetic is float32, and
// the result is rounded once.
//
// One block computes one row, in two passes: the sum of the squares, then the results. Each thread takes every 256th
// column, so that neighbouring threads load neighbouring elements. An element of x is read twice and one of normed is
// written once; the second read of x, and weight, usually hit a cache. A kernel that is as fast as the memory reads x
// once, and loads several elements at a time.
#include "kit/launch.cuh"
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "rmsnorm-naive";

namespace {

using namespace kit;

constexpr int kThreads = 256;

// Returns the sum of one value of each thread of the block, to all of them.
__device__ float block_sum(float value) {
  __shared__ float values[kThreads];
  values[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    __syncthreads();
  }
  return values[0];
}

template <typename T>
__global__ void rms_norm_kernel(const T* x, const T* weight, T* normed, int64_t hidden, float eps) {
  const int64_t row = blockIdx.x;
  x += row * hidden;
  normed += row * hidden;

  float squares = 0.0f;
  for (int64_t column = threadIdx.x; column < hidden; column += kThreads) {
    const float value = static_cast<float>(x[column]);
    squares += value * value;
  }
  const float mean = block_sum(squares) / static_cast<float>(hidden);
  const float rstd = 1.0f / sqrtf(mean + eps);

  for (int64_t column = threadIdx.x; column < hidden; column += kThreads) {
    const float value = static_cast<float>(x[column]) * rstd * static_cast<float>(weight[column]);
    normed[column] = static_cast<T>(value);
  }
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  check_first(x, "x");
  const int64_t hidden = x.size(x.dim() - 1);
  check_dtype(weight, "weight", x);
  check_shape(weight, "weight", {&hidden, 1});
  const auto device = enter(x);
  x = torch::stable::contiguous(x);
  weight = torch::stable::contiguous(weight);
  Tensor normed = allocate_like(x);
  if (x.numel() == 0) return normed;
  const auto rows = static_cast<unsigned>(x.numel() / hidden);
  check(dispatch_dtype(element_type(x, "x"), [&](auto tag) {
    using T = typename decltype(tag)::Element;
    rms_norm_kernel<<<rows, kThreads, 0, static_cast<cudaStream_t>(current_stream(x))>>>(
        static_cast<const T*>(x.const_data_ptr()), static_cast<const T*>(weight.const_data_ptr()),
        static_cast<T*>(normed.mutable_data_ptr()), hidden, static_cast<float>(eps));
  }));
  return normed;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { ops.impl("rms_norm", TORCH_BOX(&rms_norm)); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
