// ${computed} of a range of elements, on the CPU. T is float, torch::headeronly::Half or torch::headeronly::BFloat16.
#pragma once

#include <cstdint>

namespace op {

// y[i] = max(x[i], 0) for begin <= i < end. NaN stays NaN.
template <typename T>
void forward(const T* x, T* y, int64_t begin, int64_t end);

// grad_x[i] = y[i] > 0 ? grad[i] : 0 for begin <= i < end.
template <typename T>
void backward(const T* grad, const T* y, T* grad_x, int64_t begin, int64_t end);

}  // namespace op
