// ${computed} of contiguous elements, on CUDA. T is float, torch::headeronly::Half or torch::headeronly::BFloat16.
#pragma once

#include <cstdint>

namespace op {

// Launches y[i] = max(x[i], 0) for 0 <= i < count on `stream`, a cudaStream_t. Returns the cudaError_t of the launch.
// NaN stays NaN.
template <typename T>
int forward(const T* x, T* y, int64_t count, void* stream);

// Launches grad_x[i] = y[i] > 0 ? grad[i] : 0 for 0 <= i < count. Stream and result as for `forward`.
template <typename T>
int backward(const T* grad, const T* y, T* grad_x, int64_t count, void* stream);

}  // namespace op
