// `${operator}` on a range of elements, on the CPU. T is float, torch::headeronly::Half or torch::headeronly::BFloat16.
#pragma once

#include <cstdint>

namespace op {

// Computes the result y[i] of x[i] for begin <= i < end.
template <typename T>
void forward(const T* x, T* y, int64_t begin, int64_t end);

// Computes the gradient of x[i] from that of the result, grad[i], and the result y[i], for begin <= i < end.
template <typename T>
void backward(const T* grad, const T* y, T* grad_x, int64_t begin, int64_t end);

}  // namespace op
