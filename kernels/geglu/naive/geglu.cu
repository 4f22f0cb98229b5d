// Gated activations, forward: the readable statement of `geglu`, `swiglu` and their functions for two tensors.
//
//   out[row][column] = up[row][column] * activation(gate[row][column])
//
//   gelu(x)      = x / 2 * (1 + erf(x / sqrt(2)))
//   gelu_tanh(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
//   silu(x)      = x / (1 + exp(-x))
//
// Shazeer, "GLU Variants Improve Transformer" (2020), https://arxiv.org/abs/2002.05202; Hendrycks and Gimpel, "Gaussian
// Error Linear Units" (2016), https://arxiv.org/abs/1606.08415.
//
// gate, up and out are [rows, hidden] and of one dtype. The rows of gate and up are contiguous and `stride` elements
// apart: hidden for two tensors, and 2 * hidden for the halves of the rows of one. out is contiguous. The arithmetic is
// float32, and the result is rounded once.
//
// One thread computes one element: it loads one element of gate and one of up, and stores one of out. Neighbouring
// threads load neighbouring elements. A kernel that is as fast as the memory loads several elements at a time, so that
// more bytes are on their way.
#include "kit/launch.cuh"
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "geglu-naive";

namespace {

using namespace kit;

constexpr int kThreads = 256;

// The numbers are those of geglu::Activation.
__device__ float activated(float x, int activation) {
  if (activation == 0) return x / 2.0f * (1.0f + erff(x * 0.70710678f));
  if (activation == 1) return x / 2.0f * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  return x / (1.0f + expf(-x));
}

template <typename T>
__global__ void gated_kernel(const T* gate, const T* up, T* out, int64_t rows, int64_t hidden, int64_t stride,
                             int activation) {
  const int64_t element = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (element >= rows * hidden) return;
  const int64_t from = element / hidden * stride + element % hidden;
  const float value = static_cast<float>(up[from]) * activated(static_cast<float>(gate[from]), activation);
  out[element] = static_cast<T>(value);
}

Tensor gated(Tensor gate, Tensor up, int64_t activation) {
  check_backend(gate, "gate");
  if (gate.dim() != 2 || gate.stride(1) != 1) fail("gate", "must have two dimensions, and adjacent elements in a row");
  check_like(up, "up", gate, "gate");
  if (!up.strides().equals(gate.strides())) fail("up", "must have the strides of gate");
  const auto device = enter(gate);
  Tensor out = allocate_like(gate);
  if (gate.numel() == 0) return out;
  const auto blocks = static_cast<unsigned>((gate.numel() + kThreads - 1) / kThreads);
  check(dispatch_dtype(element_type(gate, "gate"), [&](auto tag) {
    using T = typename decltype(tag)::Element;
    gated_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(current_stream(gate))>>>(
        static_cast<const T*>(gate.const_data_ptr()), static_cast<const T*>(up.const_data_ptr()),
        static_cast<T*>(out.mutable_data_ptr()), gate.size(0), gate.size(1), gate.stride(0),
        static_cast<int>(activation));
  }));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("gated(Tensor gate, Tensor up, int activation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { ops.impl("gated", TORCH_BOX(&gated)); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
