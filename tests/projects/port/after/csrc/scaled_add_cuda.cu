#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/core/Dispatch_v2.h>

#include "scaled_add.h"

using torch::stable::Tensor;

template <typename T>
__global__ void scaled_add_kernel(const T* a, const T* b, T scale, T* out, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = a[i] + scale * b[i];
}

template <typename T>
void launch(const Tensor& a, const Tensor& b, T scale, Tensor& out, cudaStream_t stream) {
  const unsigned blocks = (a.numel() + 255) / 256;
  if (blocks == 0) return;
  scaled_add_kernel<<<blocks, 256, 0, stream>>>(a.const_data_ptr<T>(), b.const_data_ptr<T>(), scale,
                                                out.mutable_data_ptr<T>(), a.numel());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void scaled_add_cuda(const Tensor& a, const Tensor& b, double scale, Tensor& out) {
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(a.get_device_index(), &stream));
  THO_DISPATCH_V2(a.scalar_type(), "scaled_add",
                  AT_WRAP([&] { launch<scalar_t>(a, b, scale, out, static_cast<cudaStream_t>(stream)); }),
                  AT_EXPAND(AT_FLOATING_TYPES));
}
