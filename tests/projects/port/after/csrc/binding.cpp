#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "registration.h"
#include "scaled_add.h"

using torch::stable::Tensor;

Tensor scaled_add(Tensor a, Tensor b, double scale) {
  STD_TORCH_CHECK(a.sizes().equals(b.sizes()), "a and b differ in shape");
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type() && a.device() == b.device(), "a and b differ in dtype or device");
  a = torch::stable::contiguous(a);
  b = torch::stable::contiguous(b);
  Tensor out = torch::stable::empty_like(a);
#ifdef CUDA_KERNEL
  scaled_add_cuda(a, b, scale, out);
#else
  scaled_add_cpu(a, b, scale, out);
#endif
  return out;
}

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, m) {
  m.def("scaled_add(Tensor a, Tensor b, float scale=1.0) -> Tensor");
}

#ifdef CUDA_KERNEL
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, m) { m.impl("scaled_add", TORCH_BOX(&scaled_add)); }
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, m) { m.impl("scaled_add", TORCH_BOX(&scaled_add)); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
