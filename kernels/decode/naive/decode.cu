// One decoding step of a language model: the readable statement of `linear`, `gated_linear` and `attention`.
//
//   linear:        out[r][n] = x[r] . weight[n]
//   gated_linear:  out[r][n] = silu(x[r] . weight[n]) * (x[r] . up[n]), where silu(a) = a / (1 + exp(-a))
//   attention:     out[h] = sum over t of softmax(scale * query[h] . key[h / group][t]) * value[h / group][t]
//
// x is [rows, inputs], weight and up are [outputs, inputs]. query and out are [heads, elements], key and value are
// [heads / group, tokens, elements]. All are contiguous and of one dtype. The arithmetic is float32, rounded once.
//
// One thread computes one output of a linear layer or one head of attention, and reads a whole row of weights or all
// tokens. A fast kernel lets neighbouring threads read neighbouring elements, once for all rows of x or heads.
#include "kit/launch.cuh"

namespace naive {
namespace {

constexpr int kThreads = 128, kMostElements = 256;

template <typename T>
__device__ float dot(const T* a, const T* b, int64_t count) {
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<float>(a[i]) * static_cast<float>(b[i]);
  return sum;
}

template <typename T>
__global__ void linear_kernel(const T* x, const T* weight, const T* up, T* out, int64_t rows, int64_t inputs,
                              int64_t outputs) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= rows * outputs) return;
  const int64_t row = index / outputs, n = index % outputs;
  float value = dot(x + row * inputs, weight + n * inputs, inputs);
  if (up != nullptr) value = value / (1.0f + expf(-value)) * dot(x + row * inputs, up + n * inputs, inputs);
  out[index] = static_cast<T>(value);
}

template <typename T>
__global__ void attention_kernel(const T* query, const T* key, const T* value, T* out, int64_t heads, int64_t group,
                                 int64_t tokens, int64_t elements, float scale) {
  const int64_t head = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (head >= heads) return;
  float largest = -INFINITY, total = 0.0f, sums[kMostElements]{};
  for (int64_t token = head / group * tokens; token < (head / group + 1) * tokens; ++token) {
    const float score = scale * dot(query + head * elements, key + token * elements, elements);
    const float factor = score > largest ? expf(largest - score) : 1.0f;
    largest = fmaxf(largest, score);
    const float weight = expf(score - largest);
    total = total * factor + weight;
    for (int64_t i = 0; i < elements; ++i) {
      sums[i] = sums[i] * factor + weight * static_cast<float>(value[token * elements + i]);
    }
  }
  for (int64_t i = 0; i < elements; ++i) out[head * elements + i] = static_cast<T>(sums[i] / total);
}

}  // namespace

// Launch on the current device and return a cudaError_t. `type` is the dtype of all tensors; `up` is null without gate.
int linear(kit::Type type, const void* x, const void* weight, const void* up, void* out, int64_t rows, int64_t inputs,
           int64_t outputs, void* stream) {
  return kit::dispatch_dtype(type, [&](auto tag) {
    using T = typename decltype(tag)::Element;
    linear_kernel<<<(rows * outputs + kThreads - 1) / kThreads, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(up), static_cast<T*>(out), rows,
        inputs, outputs);
  });
}

int attention(kit::Type type, const void* query, const void* key, const void* value, void* out, int64_t heads,
              int64_t group, int64_t tokens, int64_t elements, float scale, void* stream) {
  return kit::dispatch_dtype(type, [&](auto tag) {
    using T = typename decltype(tag)::Element;
    attention_kernel<<<(heads + kThreads - 1) / kThreads, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(query), static_cast<const T*>(key), static_cast<const T*>(value), static_cast<T*>(out),
        heads, group, tokens, elements, scale);
  });
}

}  // namespace naive
