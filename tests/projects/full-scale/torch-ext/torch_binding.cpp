#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "registration.h"
#include "scale/scale.h"

at::Tensor scaled(const at::Tensor& in, double factor) {
  TORCH_CHECK(in.is_contiguous(), "in: expected a contiguous tensor, got ", in.dim(), " dimensions: ", in.sizes());
  at::Tensor out = at::empty_like(in);
  scale(out.data_ptr<float>(), in.data_ptr<float>(), factor, in.numel(), nullptr);
  return out;
}

TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("scaled(Tensor input, float factor) -> Tensor");
#if defined(CUDA_KERNEL)
  ops.impl("scaled", c10::kCUDA, &scaled);
#else
  ops.impl("scaled", c10::kCPU, &scaled);
#endif
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
