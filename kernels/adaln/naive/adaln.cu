// LayerNorm with a scale and a shift for each sample, forward: the readable statement of `ada_layer_norm`.
//
//   centered[row][column] = x[row][column] - mean(x[row])
//   normed[row][column]   = centered[row][column] / sqrt(mean(centered[row]^2) + eps) * (1 + scale[sample][column])
//                           + shift[sample][column],   sample = row / tokens
//
// Ba, Kiros and Hinton, "Layer Normalization" (2016), https://arxiv.org/abs/1607.06450; the modulation is that of
// Peebles and Xie, "Scalable Diffusion Models with Transformers" (2022), https://arxiv.org/abs/2212.09748.
//
// x and normed are [samples, tokens, hidden], contiguous. scale and shift are [samples, hidden]; their rows are
// contiguous and `modulation_stride` elements apart, as slices of one tensor are. All have one dtype. The arithmetic is
// float32, and the result is rounded once.
//
// One block computes one row, in three passes: the mean, the variance, the results. Each thread takes every 256th
// column, so that neighbouring threads load neighbouring elements. An element of x is read three times and one of
// normed is written once; the later reads of x, and those of scale and shift, usually hit a cache.
#include "kit/launch.cuh"
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "adaln-naive";

namespace {

using namespace kit;

constexpr int kThreads = 256;

// Returns the sum of one value of each thread of the block, to all of them.
__device__ float block_sum(float value) {
  __shared__ float values[kThreads];
  __syncthreads();  // the sum before has been read
  values[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    __syncthreads();
  }
  return values[0];
}

template <typename T>
__global__ void ada_layer_norm_kernel(const T* x, const T* scale, const T* shift, T* normed, int64_t tokens,
                                      int64_t hidden, int64_t modulation_stride, float eps) {
  const int64_t row = blockIdx.x, sample = row / tokens;
  x += row * hidden;
  normed += row * hidden;
  scale += sample * modulation_stride;
  shift += sample * modulation_stride;

  float sum = 0.0f, squares = 0.0f;
  for (int64_t column = threadIdx.x; column < hidden; column += kThreads) sum += static_cast<float>(x[column]);
  const float mean = block_sum(sum) / static_cast<float>(hidden);
  for (int64_t column = threadIdx.x; column < hidden; column += kThreads) {
    const float centered = static_cast<float>(x[column]) - mean;
    squares += centered * centered;
  }
  const float rstd = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(hidden) + eps);
  for (int64_t column = threadIdx.x; column < hidden; column += kThreads) {
    const float value = (static_cast<float>(x[column]) - mean) * rstd;
    normed[column] =
        static_cast<T>(value * (1.0f + static_cast<float>(scale[column])) + static_cast<float>(shift[column]));
  }
}

Tensor ada_layer_norm(Tensor x, Tensor scale, Tensor shift, double eps) {
  check_backend(x, "x");
  if (x.dim() != 3) fail("x", "must have three dimensions: samples, tokens, elements");
  const int64_t samples = x.size(0), tokens = x.size(1), hidden = x.size(2), sizes[] = {samples, 1, hidden};
  check_dtype(scale, "scale", x);
  check_shape(scale, "scale", {sizes, 3});
  check_like(shift, "shift", scale, "scale");
  if (!adjacent(scale) || !shift.strides().equals(scale.strides())) fail("shift", "must have the strides of scale");
  const auto device = enter(x);
  x = torch::stable::contiguous(x);
  Tensor normed = allocate_like(x);
  if (x.numel() == 0) return normed;
  check(dispatch_dtype(element_type(x, "x"), [&](auto tag) {
    using T = typename decltype(tag)::Element;
    ada_layer_norm_kernel<<<static_cast<unsigned>(samples * tokens), kThreads, 0,
                            static_cast<cudaStream_t>(current_stream(x))>>>(
        static_cast<const T*>(x.const_data_ptr()), static_cast<const T*>(scale.const_data_ptr()),
        static_cast<const T*>(shift.const_data_ptr()), static_cast<T*>(normed.mutable_data_ptr()), tokens, hidden,
        scale.stride(0), static_cast<float>(eps));
  }));
  return normed;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("ada_layer_norm(Tensor x, Tensor scale, Tensor shift, float eps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("ada_layer_norm", TORCH_BOX(&ada_layer_norm));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
