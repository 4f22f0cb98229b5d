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

namespace naive {
namespace {

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

}  // namespace

// Launches on the current device and returns a cudaError_t. `type` is the dtype of all tensors.
int ada_layer_norm(kit::Type type, const void* x, const void* scale, const void* shift, void* normed, int64_t samples,
                   int64_t tokens, int64_t hidden, int64_t modulation_stride, float eps, void* stream) {
  return kit::dispatch_dtype(type, [&](auto tag) {
    using T = typename decltype(tag)::Element;
    ada_layer_norm_kernel<<<static_cast<unsigned>(samples * tokens), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(x), static_cast<const T*>(scale), static_cast<const T*>(shift), static_cast<T*>(normed),
        tokens, hidden, modulation_stride, eps);
  });
}

}  // namespace naive
