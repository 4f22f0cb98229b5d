// ReLU over a range of elements, on the CPU. T is float, Half or BFloat16 of torch/headeronly.
#pragma once

#include <cstdint>

namespace relu {

// y[i] = max(x[i], 0) for begin <= i < end. NaN stays NaN.
template <typename T>
void forward(const T* x, T* y, int64_t begin, int64_t end);

// grad_x[i] = grad[i] where y[i] > 0, else 0, for begin <= i < end.
template <typename T>
void backward(const T* grad, const T* y, T* grad_x, int64_t begin, int64_t end);

}  // namespace relu
