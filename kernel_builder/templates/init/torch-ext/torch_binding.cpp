// Binds the kernels to Torch through its stable ABI, as of Torch 2.10. Compiled once for each backend.
//
// Reads:    sizes, strides, dtypes and devices of the arguments.
// Writes:   only tensors that it allocates.
// Must not: compute; call anything of Torch newer than 2.10.
#include "${operator}/${operator}.h"
#include "kit/tensors.h"
#include "registration.h"
#if defined(CUDA_KERNEL)
#include "${python_name}_cuda/${operator}.h"
#else
#include "${python_name}_cpu/${operator}.h"
#endif

const char* const kit::kProject = "${name}";

namespace {

using namespace kit;

void run(const op::Problem& problem, [[maybe_unused]] const Tensor& x) {
  if (problem.elements == 0) return;
#if defined(CUDA_KERNEL)
  check(op::run(problem, current_stream(x)));
#else
  torch::stable::parallel_for(0, problem.elements, kGrain,
                              [&](int64_t begin, int64_t end) { op::run(problem, begin, end); });
#endif
}

// x * sigmoid(x), contiguous.
Tensor forward_op(Tensor x) {
  check_backend(x, "x");
  const Type type = element_type(x, "x");
  [[maybe_unused]] const auto device = enter(x);
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  Tensor out = allocate_like(x);
  run({type, x.numel(), x.const_data_ptr(), nullptr, out.mutable_data_ptr()}, x);
  return out;
}

// The gradient with respect to x, contiguous.
Tensor backward_op(Tensor grad, Tensor x) {
  check_backend(x, "x");
  const Type type = element_type(x, "x");
  check_like(grad, "grad", x);
  [[maybe_unused]] const auto device = enter(x);
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  if (!grad.is_contiguous()) grad = torch::stable::contiguous(grad);
  Tensor grad_x = allocate_like(x);
  run({type, x.numel(), x.const_data_ptr(), grad.const_data_ptr(), grad_x.mutable_data_ptr()}, x);
  return grad_x;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("${operator}(Tensor x) -> Tensor");
  ops.def("${operator}_backward(Tensor grad, Tensor x) -> Tensor");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#else
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#endif
  ops.impl("${operator}", TORCH_BOX(&forward_op));
  ops.impl("${operator}_backward", TORCH_BOX(&backward_op));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
