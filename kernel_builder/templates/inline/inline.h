// Declarations for sources of `kernel_builder.load`, and macros that register their functions as operators.
//
// Only the stable ABI of Torch 2.10, so that a project made from the source works with every later release of Torch.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

using torch::headeronly::ScalarType;
using torch::stable::empty_like;
using torch::stable::parallel_for;
using torch::stable::Tensor;

#if defined(__CUDACC__)
// The stream on which to launch kernels for a tensor. Its device must be the current one.
inline cudaStream_t stream_of(const Tensor& tensor) {
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}
#endif

namespace kernel_builder_inline {

// The name of a type in the schema of an operator. An argument `Tensor&`, not const, is one that the function writes.
template <typename T>
struct SchemaType;
template <>
struct SchemaType<Tensor> {
  static std::string name() { return "Tensor"; }
};
template <>
struct SchemaType<double> {
  static std::string name() { return "float"; }
};
template <>
struct SchemaType<int64_t> {
  static std::string name() { return "int"; }
};
template <>
struct SchemaType<bool> {
  static std::string name() { return "bool"; }
};
template <>
struct SchemaType<std::string> {
  static std::string name() { return "str"; }
};
template <typename T>
struct SchemaType<std::optional<T>> {
  static std::string name() { return SchemaType<T>::name() + "?"; }
};
template <typename T>
struct SchemaType<std::vector<T>> {
  static std::string name() { return SchemaType<T>::name() + "[]"; }
};

template <typename Argument>
std::string argument(int index) {
  const std::string number = std::to_string(index);
  if (std::is_same_v<Argument, Tensor&>) return "Tensor(a" + number + "!) x" + number;
  return SchemaType<std::remove_cv_t<std::remove_reference_t<Argument>>>::name() + " x" + number;
}

template <typename Result>
struct Results {
  static std::string names() { return SchemaType<Result>::name(); }
};
template <>
struct Results<void> {
  static std::string names() { return "()"; }
};
template <typename... Each>
struct Results<std::tuple<Each...>> {
  static std::string names() {
    std::string list;
    ((list += (list.empty() ? "" : ", ") + SchemaType<Each>::name()), ...);
    return "(" + list + ")";
  }
};

template <typename Result, typename... Arguments>
std::string schema(const char* name, Result (*)(Arguments...)) {
  std::string list;
  int index = 0;
  ((list += (list.empty() ? "" : ", ") + argument<Arguments>(index++)), ...);
  return std::string(name) + "(" + list + ") -> " + Results<Result>::names();
}

// Makes the tensors' device current while a function runs.
template <auto kFunction>
struct OnDevice;
template <typename Result, typename... Arguments, Result (*kFunction)(Arguments...)>
struct OnDevice<kFunction> {
  static Result call(Arguments... arguments) {
#if defined(__CUDACC__)
    const Tensor* first = nullptr;
    const auto visit = [&](const auto& argument) {
      if constexpr (std::is_same_v<std::decay_t<decltype(argument)>, Tensor>)
        first = first == nullptr ? &argument : first;
    };
    (visit(arguments), ...);
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
    if (first != nullptr) guard.emplace(first->get_device_index());
    if constexpr (std::is_void_v<Result>) {
      kFunction(static_cast<Arguments>(arguments)...);
      check_launch();
    } else {
      Result result = kFunction(static_cast<Arguments>(arguments)...);
      check_launch();
      return result;
    }
  }
  static void check_launch() {
    const cudaError_t error = cudaGetLastError();
    STD_TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error));
#else
    return kFunction(static_cast<Arguments>(arguments)...);
#endif
  }
};

}  // namespace kernel_builder_inline

#define KERNEL_BUILDER_DEFINE(ops, function) ops.def(kernel_builder_inline::schema(#function, &function).c_str())
#define KERNEL_BUILDER_IMPLEMENT(ops, function) \
  ops.impl(#function, TORCH_BOX(&kernel_builder_inline::OnDevice<&function>::call))
