// Binds the kernels to Torch through its stable ABI, as of Torch 2.10. Compiled once for each backend.
//
// Reads:    sizes, strides, dtypes and devices of the arguments.
// Writes:   only tensors that it allocates.
// Must not: compute; call anything of Torch newer than 2.10.
#include "${python_name}/${operator}.h"
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "${name}";

namespace {

using kit::Tensor;

// Returns a contiguous tensor: the result for x, or with `grad` the gradient with respect to x.
Tensor run(Tensor x, Tensor* grad) {
  kit::check_backend(x, "x");
  const kit::Type type = kit::element_type(x, "x");
  if (grad != nullptr) kit::check_like(*grad, "grad", x);
  [[maybe_unused]] const auto device = kit::enter(x);
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  if (grad != nullptr && !grad->is_contiguous()) *grad = torch::stable::contiguous(*grad);
  Tensor out = kit::allocate_like(x);
  const op::Problem problem{type, x.numel(), x.const_data_ptr(), grad == nullptr ? nullptr : grad->const_data_ptr(),
                            out.mutable_data_ptr()};
  if (problem.elements == 0) return out;
#if defined(CUDA_KERNEL)
  kit::check(op::run_on_cuda(problem, kit::current_stream(x)));
#else
  torch::stable::parallel_for(0, problem.elements, kit::kGrain,
                              [&](int64_t begin, int64_t end) { op::run_on_cpu(problem, begin, end); });
#endif
  return out;
}

Tensor forward(Tensor x) { return run(x, nullptr); }
Tensor backward(Tensor grad, Tensor x) { return run(x, &grad); }

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
  ops.impl("${operator}", TORCH_BOX(&forward));
  ops.impl("${operator}_backward", TORCH_BOX(&backward));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
