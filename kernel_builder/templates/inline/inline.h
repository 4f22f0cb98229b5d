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

#include "registration.h"

using torch::headeronly::ScalarType;
using torch::stable::empty_like;
using torch::stable::parallel_for;
using torch::stable::Tensor;

#if defined(CUDA_KERNEL)
// The stream on which to launch kernels for a tensor. Its device must be the current one.
inline cudaStream_t stream_of(const Tensor& tensor) {
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}
#endif

namespace kernel_builder_inline {

// Names of types in the schema of an operator, by a null pointer to the type.
inline std::string type_name(const Tensor*) { return "Tensor"; }
inline std::string type_name(const double*) { return "float"; }
inline std::string type_name(const int64_t*) { return "int"; }
inline std::string type_name(const bool*) { return "bool"; }
inline std::string type_name(const std::string*) { return "str"; }
template <typename T>
std::string type_name(const std::vector<T>*);
template <typename T>
std::string type_name(const std::optional<T>*) {
  return type_name(static_cast<const T*>(nullptr)) + "?";
}
template <typename T>
std::string type_name(const std::vector<T>*) {
  return type_name(static_cast<const T*>(nullptr)) + "[]";
}
template <typename... Each>
std::string type_name(const std::tuple<Each...>*) {
  std::string list;
  ((list += (list.empty() ? "" : ", ") + type_name(static_cast<const Each*>(nullptr))), ...);
  return "(" + list + ")";
}

// An argument `Tensor&`, not const, is one that the function writes.
template <typename Argument>
std::string argument(int index) {
  const std::string number = std::to_string(index);
  if (std::is_same_v<Argument, Tensor&>) return "Tensor(a" + number + "!) x" + number;
  return type_name(static_cast<const std::remove_reference_t<Argument>*>(nullptr)) + " x" + number;
}

template <typename Result, typename... Arguments>
std::string schema(const char* name, Result (*)(Arguments...)) {
  std::string list;
  int index = 0;
  ((list += (list.empty() ? "" : ", ") + argument<Arguments>(index++)), ...);
  std::string results = "()";
  if constexpr (!std::is_void_v<Result>) results = type_name(static_cast<const Result*>(nullptr));
  return std::string(name) + "(" + list + ") -> " + results;
}

// Makes the tensors' device current while a function runs.
template <auto kFunction>
struct OnDevice;
template <typename Result, typename... Arguments, Result (*kFunction)(Arguments...)>
struct OnDevice<kFunction> {
  static Result call(Arguments... arguments) {
#if defined(CUDA_KERNEL)
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
