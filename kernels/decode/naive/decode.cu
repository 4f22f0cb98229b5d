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
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "decode-naive";

namespace {

using namespace kit;

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

void check_contiguous(const Tensor& tensor, const char* argument, int64_t dims) {
  check_backend(tensor, argument);
  if (tensor.dim() != dims || !tensor.is_contiguous() || tensor.numel() == 0) {
    fail(argument, "must be contiguous, with " + std::to_string(dims) + " dimensions");
  }
}

Tensor linear(Tensor x, Tensor weight, MaybeTensor up) {
  check_contiguous(x, "x", 2);
  check_contiguous(weight, "weight", 2);
  if (up.has_value()) check_like(*up, "up", weight, "weight");
  const auto device = enter(x);
  const int64_t rows = x.size(0), outputs = weight.size(0), sizes[] = {rows, outputs};
  Tensor out = allocate({sizes, 2}, dtype(x), x);
  check(dispatch_dtype(element_type(x, "x"), [&](auto tag) {
    using T = typename decltype(tag)::Element;
    linear_kernel<<<(rows * outputs + kThreads - 1) / kThreads, kThreads, 0,
                    static_cast<cudaStream_t>(current_stream(x))>>>(
        static_cast<const T*>(x.const_data_ptr()), static_cast<const T*>(weight.const_data_ptr()),
        static_cast<const T*>(up.has_value() ? up->const_data_ptr() : nullptr), static_cast<T*>(out.mutable_data_ptr()),
        rows, x.size(1), outputs);
  }));
  return out;
}

Tensor attention(Tensor query, Tensor key, Tensor value, double scale) {
  check_contiguous(query, "query", 4);
  check_contiguous(key, "key", 4);
  check_contiguous(value, "value", 4);
  if (query.size(3) > kMostElements) fail("query", "must have at most 256 elements per head");
  const auto device = enter(query);
  const int64_t sizes[] = {query.size(0), 1, query.size(1), query.size(3)}, heads = query.size(0) * query.size(1);
  Tensor out = allocate({sizes, 4}, dtype(query), query);
  check(dispatch_dtype(element_type(query, "query"), [&](auto tag) {
    using T = typename decltype(tag)::Element;
    attention_kernel<<<(heads + kThreads - 1) / kThreads, kThreads, 0,
                       static_cast<cudaStream_t>(current_stream(query))>>>(
        static_cast<const T*>(query.const_data_ptr()), static_cast<const T*>(key.const_data_ptr()),
        static_cast<const T*>(value.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()), heads,
        query.size(1) / key.size(1), key.size(2), query.size(3), static_cast<float>(scale));
  }));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("linear(Tensor x, Tensor weight, Tensor? up=None) -> Tensor");
  ops.def("attention(Tensor query, Tensor key, Tensor value, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("linear", TORCH_BOX(&linear));
  ops.impl("attention", TORCH_BOX(&attention));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
