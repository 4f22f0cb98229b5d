#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/pybind.h>

#include "scaled_add.h"

at::Tensor scaled_add(at::Tensor a, at::Tensor b, double scale) {
  TORCH_CHECK(a.sizes() == b.sizes(), "a has shape ", a.sizes(), ", b has ", b.sizes());
  TORCH_CHECK(a.scalar_type() == b.scalar_type() && a.device() == b.device(), "a and b differ in dtype or device");
  a = a.contiguous();
  b = b.contiguous();
  at::Tensor out = at::empty_like(a);
#ifdef WITH_CUDA
  if (a.is_cuda()) {
    scaled_add_cuda(a, b, scale, out);
    return out;
  }
#endif
  scaled_add_cpu(a, b, scale, out);
  return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("scaled_add", &scaled_add, py::arg("a"), py::arg("b"), py::arg("scale") = 1.0);
}
