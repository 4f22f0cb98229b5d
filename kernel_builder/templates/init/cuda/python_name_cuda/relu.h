// ReLU over contiguous elements, on CUDA. T is float, Half or BFloat16 of torch/headeronly.
#pragma once

#include <cstdint>

namespace relu {

// y[i] = max(x[i], 0) for 0 <= i < count. NaN stays NaN. Queued on the stream (a cudaStream_t); returns the
// cudaError_t of the launch.
template <typename T>
int forward(const T* x, T* y, int64_t count, void* stream);

// grad_x[i] = grad[i] where y[i] > 0, else 0, for 0 <= i < count. Queued and returned as above.
template <typename T>
int backward(const T* grad, const T* y, T* grad_x, int64_t count, void* stream);

}  // namespace relu
