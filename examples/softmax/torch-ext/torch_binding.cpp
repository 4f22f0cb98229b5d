// Binds the kernels to Torch through its stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, dtypes and devices of the arguments.
// Writes:   only tensors that it allocates.
// Must not: compute; call anything of Torch newer than 2.10.
#include "kit/tensors.h"
#include "registration.h"
#include "softmax_cpu/softmax.h"

const char* const kit::kProject = "softmax";

namespace {

using namespace kit;

int64_t columns_of(const Tensor& x) { return x.dim() == 0 ? 1 : x.size(x.dim() - 1); }

void run(const op::Problem& problem, int64_t elements) {
  if (elements == 0) return;
  run_parallel(problem, elements / problem.columns, problem.columns, op::run);
}

// The softmax of the last dimension, contiguous.
Tensor forward_op(Tensor x) {
  check_backend(x, "x");
  const Type type = element_type(x, "x");
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  Tensor y = allocate_like(x);
  run({type, columns_of(x), x.const_data_ptr(), nullptr, y.mutable_data_ptr()}, x.numel());
  return y;
}

// The gradient with respect to x, contiguous.
Tensor backward_op(Tensor grad, Tensor y) {
  check_backend(y, "y");
  const Type type = element_type(y, "y");
  check_like(grad, "grad", y, "y");
  if (!y.is_contiguous()) y = torch::stable::contiguous(y);
  if (!grad.is_contiguous()) grad = torch::stable::contiguous(grad);
  Tensor grad_x = allocate_like(y);
  run({type, columns_of(y), y.const_data_ptr(), grad.const_data_ptr(), grad_x.mutable_data_ptr()}, y.numel());
  return grad_x;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("softmax(Tensor x) -> Tensor");
  ops.def("softmax_backward(Tensor grad, Tensor y) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("softmax", TORCH_BOX(&forward_op));
  ops.impl("softmax_backward", TORCH_BOX(&backward_op));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
