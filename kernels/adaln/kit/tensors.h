// What bindings ask of tensors, through Torch's stable ABI as of Torch 2.10. What is wrong with an argument is reported
// as an error that names it.
//
// Reads:    sizes, strides, types and devices.
// Writes:   tensors that it allocates itself.
// Must not: compute; call anything of Torch newer than 2.10.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kit/rows.h"

namespace kit {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::stable::Tensor;

// What errors start with. Each project defines its own, in its binding.
extern const char* const kProject;

[[noreturn]] inline void fail(const char* argument, const std::string& problem) {
  throw std::runtime_error(std::string(kProject) + ": " + argument + " " + problem);
}

inline std::string text(IntHeaderOnlyArrayRef sizes) {
  std::string list = "[";
  for (const int64_t size : sizes) list += (list.size() > 1 ? ", " : "") + std::to_string(size);
  return list + "]";
}

inline int32_t dtype(const Tensor& tensor) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

inline int32_t device_type(const Tensor& tensor) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &code));
  return code;
}

template <class T>
Type element_type(const T& tensor, const char* argument) {
  const int32_t code = dtype(tensor);
  if (code == aoti_torch_dtype_float32()) return Type::float32;
  if (code == aoti_torch_dtype_float16()) return Type::float16;
  if (code == aoti_torch_dtype_bfloat16()) return Type::bfloat16;
  fail(argument, "must be float32, float16 or bfloat16");
}

inline Tensor contiguous_copy(const Tensor& tensor) { return torch::stable::contiguous(tensor); }

// That a tensor is where these kernels run.
template <class T>
void check_here(const T& tensor, const char* argument) {
#if defined(CUDA_KERNEL)
  if (!tensor.is_cuda()) fail(argument, "must be on a CUDA device");
#else
  if (!tensor.is_cpu()) fail(argument, "must be on the CPU");
#endif
}

template <class T, class Other>
void check_device(const T& tensor, const char* argument, const Other& other, const char* other_name = "x") {
  if (device_type(tensor) != device_type(other) || tensor.get_device_index() != other.get_device_index()) {
    fail(argument, std::string("must be on the device of ") + other_name);
  }
}

// That a tensor has the device, the dtype and the shape of another.
template <class T>
void check_like(const T& tensor, const char* argument, const T& other, const char* other_name = "x") {
  check_device(tensor, argument, other, other_name);
  if (dtype(tensor) != dtype(other)) fail(argument, std::string("must have the dtype of ") + other_name);
  const auto sizes = tensor.sizes(), expected = other.sizes();
  if (!sizes.equals(expected)) fail(argument, "must have shape " + text(expected) + ", not " + text(sizes));
}

// Folds the leading dimensions into as few as their strides allow. Replaces the tensor by a contiguous copy where that
// leaves too many, or too many rows in more than one, or where the elements of a row are not adjacent.
template <class T>
Rows rows_of(T& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const size_t last = sizes.size() - 1;
  Rows rows;
  rows.data = tensor.const_data_ptr();
  bool foldable = sizes[last] == 1 || strides[last] == 1;
  int64_t reversed_sizes[kMaxDims], reversed_strides[kMaxDims];
  for (size_t dim = last; foldable && dim-- > 0;) {
    if (sizes[dim] == 1) continue;
    const int top = rows.dims - 1;
    if (top >= 0 && strides[dim] == reversed_strides[top] * reversed_sizes[top]) {
      reversed_sizes[top] *= sizes[dim];
    } else if (rows.dims < kMaxDims) {
      reversed_sizes[rows.dims] = sizes[dim];
      reversed_strides[rows.dims++] = strides[dim];
    } else {
      foldable = false;
    }
  }
  constexpr int64_t kMostRows = int64_t{1} << 31;
  if (!foldable || (rows.dims > 1 && tensor.numel() / sizes[last] >= kMostRows)) {
    tensor = contiguous_copy(tensor);
    return rows_of(tensor);
  }
  for (int dim = 0; dim < rows.dims; ++dim) {
    rows.sizes[dim] = reversed_sizes[rows.dims - 1 - dim];
    rows.strides[dim] = reversed_strides[rows.dims - 1 - dim];
  }
  return rows;
}

struct Nothing {};

// What must live while a kernel is launched, or runs, where Torch has called us.
inline Nothing running(const Tensor&) { return {}; }

#if defined(CUDA_KERNEL)

// Throws what a launch returned, unless it is success.
inline void check(int error) {
  if (error == 0) return;
  char* message = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_c10_cuda_check_msg(error, __FILE__, __func__, __LINE__, true, &message));
  const std::string text = message == nullptr ? "error " + std::to_string(error) : message;
  torch_c10_cuda_free_error_msg(message);
  throw std::runtime_error(std::string(kProject) + ": " + text);
}

using Device = torch::stable::accelerator::DeviceGuard;

// Makes the device of a tensor the current one, for as long as the result lives.
inline Device enter(const Tensor& x) { return Device(x.get_device_index()); }

template <class T>
void* current_stream(const T& x) {
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return stream;
}

#else

using Device = Nothing;

template <class T>
Device enter(const T&) {
  return {};
}

// So many elements are worth a thread of `torch::stable::parallel_for`.
constexpr int64_t kGrain = 32768;

// How many items of so many elements each are.
inline int64_t grain(int64_t elements) { return elements < kGrain ? kGrain / elements : 1; }

#endif

// Dimensions of a tensor that Torch makes, at most.
constexpr size_t kMostDims = 64;

// Makes tensors for an operator, on the device of another.
struct Empty {
  Device enter(const Tensor& beside) const { return kit::enter(beside); }

  Tensor operator()(IntHeaderOnlyArrayRef sizes, int32_t dtype, const Tensor& beside) const {
    int64_t strides[kMostDims];
    if (sizes.size() > kMostDims) throw std::runtime_error(std::string(kProject) + ": too many dimensions");
    int64_t stride = 1;
    for (size_t dim = sizes.size(); dim-- > 0; stride *= sizes[dim] > 0 ? sizes[dim] : 1) strides[dim] = stride;
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides, dtype,
                                                    device_type(beside), beside.get_device_index(), &handle));
    return Tensor(handle);
  }

  // What an operator returns where nobody has asked for a result: a tensor without elements.
  Tensor nothing(int32_t dtype, const Tensor& beside) const {
    constexpr int64_t kNone = 0;
    return (*this)({&kNone, 1}, dtype, beside);
  }
};

constexpr Empty empty;

inline void fill_with_zeros(Tensor& tensor) { TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(tensor.get())); }

}  // namespace kit
