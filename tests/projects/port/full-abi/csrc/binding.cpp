#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "registration.h"
#include "scaled_add.h"

at::Tensor scaled_add(at::Tensor a, at::Tensor b, double scale) {
  TORCH_CHECK(a.sizes() == b.sizes(), "a has shape ", a.sizes(), ", b has ", b.sizes());
  TORCH_CHECK(a.scalar_type() == b.scalar_type() && a.device() == b.device(), "a and b differ in dtype or device");
  a = a.contiguous();
  b = b.contiguous();
  at::Tensor out = at::empty_like(a);
#ifdef CUDA_KERNEL
  scaled_add_cuda(a, b, scale, out);
#else
  scaled_add_cpu(a, b, scale, out);
#endif
  return out;
}

TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, m) { m.def("scaled_add(Tensor a, Tensor b, float scale=1.0) -> Tensor"); }

#ifdef CUDA_KERNEL
TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, m) { m.impl("scaled_add", &scaled_add); }
#else
TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, m) { m.impl("scaled_add", &scaled_add); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
