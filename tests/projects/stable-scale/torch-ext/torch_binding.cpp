#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "registration.h"
#include "scale/scale.h"

using torch::stable::Tensor;

Tensor scaled(Tensor in, double factor) {
  STD_TORCH_CHECK(in.is_contiguous(), "in: expected a contiguous tensor");
  Tensor out = torch::stable::empty_like(in);
  scale(static_cast<float*>(out.data_ptr()), static_cast<const float*>(in.data_ptr()), factor, in.numel(), nullptr);
  return out;
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("scaled(Tensor input, float factor) -> Tensor"); }

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { ops.impl("scaled", TORCH_BOX(&scaled)); }
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { ops.impl("scaled", TORCH_BOX(&scaled)); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
