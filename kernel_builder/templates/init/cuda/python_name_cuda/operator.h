// `${operator}` on contiguous elements, on CUDA. T is float, torch::headeronly::Half or torch::headeronly::BFloat16.
#pragma once

#include <cstdint>

namespace op {

// Launches the kernel that computes the result y[i] of x[i], for 0 <= i < count, on `stream`, a cudaStream_t. Returns
// the cudaError_t of the launch.
template <typename T>
int forward(const T* x, T* y, int64_t count, void* stream);

// Launches the kernel that computes the gradient of x[i] from that of the result, grad[i], and the result y[i]. Stream
// and return value as for `forward`.
template <typename T>
int backward(const T* grad, const T* y, T* grad_x, int64_t count, void* stream);

}  // namespace op
