// ReLU forward and backward on the CPU: loops that the compiler vectorizes.
//
// The caller splits the elements among threads; these functions compute one range in the calling thread.
#include "${python_name}_cpu/relu.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

namespace relu {

template <typename T>
void forward(const T* x, T* y, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float value = x[i];
    y[i] = value <= 0.0f ? 0.0f : value;
  }
}

template <typename T>
void backward(const T* grad, const T* y, T* grad_x, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    grad_x[i] = static_cast<float>(y[i]) <= 0.0f ? 0.0f : static_cast<float>(grad[i]);
  }
}

#define INSTANTIATE(T)                                   \
  template void forward(const T*, T*, int64_t, int64_t); \
  template void backward(const T*, const T*, T*, int64_t, int64_t);
INSTANTIATE(float)
INSTANTIATE(torch::headeronly::Half)
INSTANTIATE(torch::headeronly::BFloat16)

}  // namespace relu
