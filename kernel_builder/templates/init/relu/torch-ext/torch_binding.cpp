// Registers the operators with Torch: checks arguments, allocates results, and calls the kernels.
//
// This file uses only the stable ABI of Torch 2.10, so that one binary works with every later release of Torch.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include "registration.h"
// This file is compiled once for each backend, and linked with the sources of that backend.
#if defined(CUDA_KERNEL)
#include "${python_name}_cuda/${operator}.h"
#else
#include "${python_name}_cpu/${operator}.h"
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Calls `run` with a null pointer of the tensor's element type.
template <typename Run>
void with_type_of(const Tensor& tensor, Run run) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return run(static_cast<float*>(nullptr));
    case ScalarType::Half:
      return run(static_cast<torch::headeronly::Half*>(nullptr));
    case ScalarType::BFloat16:
      return run(static_cast<torch::headeronly::BFloat16*>(nullptr));
    default:
      STD_TORCH_CHECK(false, "${name}: expected float32, float16 or bfloat16");
  }
}

#if defined(CUDA_KERNEL)

void check(int error) {
  if (error == 0) return;
  char* message = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_c10_cuda_check_msg(error, __FILE__, __func__, __LINE__, true, &message));
  const std::string text = message == nullptr ? "CUDA error " + std::to_string(error) : message;
  torch_c10_cuda_free_error_msg(message);
  STD_TORCH_CHECK(false, "${name}: ", text);
}

// Calls `launch` with the current stream of the tensor's device, and makes that device current.
template <typename Launch>
void run_on_device_of(const Tensor& tensor, Launch launch) {
  const torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  check(launch(stream));
}

template <typename T>
void forward(const Tensor& x, Tensor& y) {
  run_on_device_of(
      x, [&](void* stream) { return op::forward(x.const_data_ptr<T>(), y.mutable_data_ptr<T>(), x.numel(), stream); });
}

template <typename T>
void backward(const Tensor& grad, const Tensor& y, Tensor& grad_x) {
  run_on_device_of(y, [&](void* stream) {
    return op::backward(grad.const_data_ptr<T>(), y.const_data_ptr<T>(), grad_x.mutable_data_ptr<T>(), y.numel(),
                        stream);
  });
}

#else

// Elements for each thread at least; fewer do not repay starting a thread.
constexpr int64_t kGrain = 32768;

template <typename T>
void forward(const Tensor& x, Tensor& y) {
  const T* from = x.const_data_ptr<T>();
  T* to = y.mutable_data_ptr<T>();
  torch::stable::parallel_for(0, x.numel(), kGrain,
                              [&](int64_t begin, int64_t end) { op::forward(from, to, begin, end); });
}

template <typename T>
void backward(const Tensor& grad, const Tensor& y, Tensor& grad_x) {
  const T *from = grad.const_data_ptr<T>(), *mask = y.const_data_ptr<T>();
  T* to = grad_x.mutable_data_ptr<T>();
  torch::stable::parallel_for(0, y.numel(), kGrain,
                              [&](int64_t begin, int64_t end) { op::backward(from, mask, to, begin, end); });
}

#endif

Tensor forward_op(Tensor x) {
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  Tensor y = torch::stable::empty_like(x);
  with_type_of(x, [&](auto* type) {
    if (x.numel() > 0) forward<std::remove_pointer_t<decltype(type)>>(x, y);
  });
  return y;
}

Tensor backward_op(Tensor grad, Tensor y) {
  STD_TORCH_CHECK(grad.sizes().equals(y.sizes()), "${name}: grad must have the shape of y");
  STD_TORCH_CHECK(grad.scalar_type() == y.scalar_type(), "${name}: grad must have the dtype of y");
  STD_TORCH_CHECK(grad.device() == y.device(), "${name}: grad must be on the device of y");
  if (!grad.is_contiguous()) grad = torch::stable::contiguous(grad);
  if (!y.is_contiguous()) y = torch::stable::contiguous(y);
  Tensor grad_x = torch::stable::empty_like(y);
  with_type_of(y, [&](auto* type) {
    if (y.numel() > 0) backward<std::remove_pointer_t<decltype(type)>>(grad, y, grad_x);
  });
  return grad_x;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("${operator}(Tensor x) -> Tensor");
  ops.def("${operator}_backward(Tensor grad, Tensor y) -> Tensor");
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
