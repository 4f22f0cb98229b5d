// Checks and allocations for bindings on Torch's stable ABI, as of Torch 2.10.
//
// Reads:    sizes, strides, dtypes and devices of tensors.
// Writes:   only tensors that it allocates.
// Must not: compute; call anything of Torch newer than 2.10.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kit/gpu_shims.h"
#include "kit/rows.h"

// The dispatch key of the ops, and whether it is that of GPUs.
#if defined(CUDA_KERNEL) || defined(ROCM_KERNEL)
#define KIT_BACKEND CUDA
#define KIT_ON_GPU true
#else
#define KIT_BACKEND CPU
#define KIT_ON_GPU false
#endif

namespace kit {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using std::to_string;

// The prefix of error messages. Each binding defines its own.
extern const char* const kProject;

// Throws an error that names an argument of the op.
[[noreturn]] inline void fail(const char* argument, const std::string& problem) {
  throw std::runtime_error(std::string(kProject) + ": " + argument + " " + problem);
}

inline std::string text(IntHeaderOnlyArrayRef sizes) {
  std::string list = "[";
  for (const int64_t size : sizes) list += (list.size() > 1 ? ", " : "") + to_string(size);
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

inline Type element_type(const Tensor& tensor, const char* argument) {
  const int32_t code = dtype(tensor);
  if (code == aoti_torch_dtype_float32()) return Type::float32;
  if (code == aoti_torch_dtype_float16()) return Type::float16;
  if (code == aoti_torch_dtype_bfloat16()) return Type::bfloat16;
  fail(argument, "must be float32, float16 or bfloat16");
}

// Throws unless the tensor is on a device of the backend that this binding is compiled for.
inline void check_backend(const Tensor& tensor, const char* argument) {
  if (KIT_ON_GPU && !tensor.is_cuda()) fail(argument, "must be on a CUDA device");
  if (!KIT_ON_GPU && !tensor.is_cpu()) fail(argument, "must be on the CPU");
}

inline void check_device(const Tensor& tensor, const char* argument, const Tensor& other,
                         const char* other_name = "x") {
  if (device_type(tensor) != device_type(other) || tensor.get_device_index() != other.get_device_index()) {
    fail(argument, std::string("must be on the device of ") + other_name);
  }
}

// Throws unless the tensor has the device and the dtype of `other`.
inline void check_dtype(const Tensor& tensor, const char* argument, const Tensor& other, const char* other_name = "x") {
  check_device(tensor, argument, other, other_name);
  if (dtype(tensor) != dtype(other)) fail(argument, std::string("must have the dtype of ") + other_name);
}

inline void check_shape(const Tensor& tensor, const char* argument, IntHeaderOnlyArrayRef expected) {
  if (!tensor.sizes().equals(expected)) {
    fail(argument, "must have shape " + text(expected) + ", not " + text(tensor.sizes()));
  }
}

// Throws if elements of a tensor that an op changes share their memory.
inline void check_not_expanded(const Tensor& tensor, const char* argument) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) == 0) fail(argument, "must not be expanded, to be changed in place");
  }
}

// Whether an element of `outer` has the address of the first element of `inner`, which has the same dtype. The strides
// of `outer` must nest: each is larger than the extent of all smaller ones.
inline bool starts_within(const Tensor& inner, const Tensor& outer, Type type) {
  const auto address = [](const Tensor& tensor) { return reinterpret_cast<intptr_t>(tensor.const_data_ptr()); };
  int64_t distance = (address(inner) - address(outer)) / bytes_of(type);
  if (distance < 0) return false;
  for (int64_t above = std::numeric_limits<int64_t>::max(), stride = 1; stride > 0; above = stride) {
    int64_t last = stride = 0;  // of the dimension with the next smaller stride
    for (int64_t dim = 0; dim < outer.dim(); ++dim) {
      if (outer.size(dim) > 1 && outer.stride(dim) > stride && outer.stride(dim) < above) {
        stride = outer.stride(dim);
        last = outer.size(dim) - 1;
      }
    }
    if (stride > 0) distance -= std::min(distance / stride, last) * stride;
  }
  return distance == 0;
}

// Throws if a tensor that an op changes starts within another one of its dtype, or the reverse. Tensors whose rows
// alternate in memory pass, and so do blocks of a larger tensor in which neither has the first element of the other.
inline void check_apart(const Tensor& tensor, const char* argument, const Tensor& other, const char* other_name,
                        Type type) {
  if (tensor.numel() == 0 || other.numel() == 0) return;
  if (starts_within(tensor, other, type) || starts_within(other, tensor, type)) {
    fail(argument, std::string("must not be ") + other_name + ", nor share memory with it");
  }
}

// Throws unless the tensor has the device, the dtype and the shape of `other`.
inline void check_like(const Tensor& tensor, const char* argument, const Tensor& other, const char* other_name = "x") {
  check_dtype(tensor, argument, other, other_name);
  check_shape(tensor, argument, other.sizes());
}

// Checks the tensor that determines the device and the dtype of others.
inline void check_first(const Tensor& tensor, const char* argument) {
  check_backend(tensor, argument);
  if (tensor.dim() == 0) fail(argument, "must have at least one dimension");
}

// Throws unless the tensor has the dtype of x or float32.
inline Type type_beside(const Tensor& tensor, const char* argument, const Tensor& x, const char* x_name = "x") {
  const Type type = element_type(tensor, argument);
  if (type != Type::float32 && dtype(tensor) != dtype(x)) {
    fail(argument, std::string("must have the dtype of ") + x_name + ", or float32");
  }
  return type;
}

// Checks a weight or bias of `elements` elements, of the dtype of x or float32. Replaces it by a contiguous copy if its
// elements are not adjacent.
inline Parameter parameter_of(MaybeTensor& parameter, const char* argument, int64_t elements, const Tensor& x,
                              const char* x_name = "x") {
  if (!parameter.has_value()) return {};
  check_device(*parameter, argument, x, x_name);
  check_shape(*parameter, argument, {&elements, 1});
  const Type type = type_beside(*parameter, argument, x, x_name);
  if (!parameter->is_contiguous()) parameter = torch::stable::contiguous(*parameter);
  return {parameter->const_data_ptr(), type};
}

// Whether the elements of the last dimension are adjacent.
inline bool adjacent(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.size(last) <= 1 || tensor.stride(last) == 1;
}

// Folds the leading dimensions into as few as their strides allow. Replaces the tensor by a contiguous copy if the
// elements of a row are not adjacent, if more than `most_dims` dimensions are left, or if more than one is left and
// there are 2^31 rows or more.
inline Rows rows_of(Tensor& tensor, int most_dims = kMaxDims) {
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
    } else if (rows.dims < most_dims) {
      reversed_sizes[rows.dims] = sizes[dim];
      reversed_strides[rows.dims++] = strides[dim];
    } else {
      foldable = false;
    }
  }
  constexpr int64_t kMostRows = int64_t{1} << 31;
  if (!foldable || (rows.dims > 1 && tensor.numel() / sizes[last] >= kMostRows)) {
    tensor = torch::stable::contiguous(tensor);
    return rows_of(tensor, most_dims);
  }
  for (int dim = 0; dim < rows.dims; ++dim) {
    rows.sizes[dim] = reversed_sizes[rows.dims - 1 - dim];
    rows.strides[dim] = reversed_strides[rows.dims - 1 - dim];
  }
  return rows;
}

#if KIT_ON_GPU

// Throws if a launch returned an error.
inline void check(int error) {
  if (error == 0) return;
  char* message = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_c10_cuda_check_msg(error, __FILE__, __func__, __LINE__, true, &message));
  const std::string text = message == nullptr ? "error " + to_string(error) : message;
  torch_c10_cuda_free_error_msg(message);
  throw std::runtime_error(std::string(kProject) + ": " + text);
}

// Makes the device of a tensor the current one while the result lives.
using Device = torch::stable::accelerator::DeviceGuard;
inline Device enter(const Tensor& tensor) { return Device(tensor.get_device_index()); }

inline void* current_stream(const Tensor& tensor) {
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}

#else

// The CPU needs no device guard.
struct Device {};
inline Device enter(const Tensor&) { return {}; }

// The number of elements that is worth a thread.
constexpr int64_t kGrain = 32768;

// The functions of the CPU return no errors.
inline void check(int) {}

// Calls `function(problem, begin, end)` with ranges of `count` items of `elements` elements each, on several threads.
template <class Problem, class Function>
void run_parallel(const Problem& problem, int64_t count, int64_t elements, Function function) {
  torch::stable::parallel_for(0, count, elements < kGrain ? kGrain / elements : 1,
                              [&](int64_t begin, int64_t end) { function(problem, begin, end); });
}

// The same for the function `run` in the namespace of the problem.
template <class Problem>
void run_parallel(const Problem& problem, int64_t count, int64_t elements) {
  run_parallel(problem, count, elements, [](const Problem& of, int64_t begin, int64_t end) { run(of, begin, end); });
}

#endif

// Calls the function `run` in the namespace of a problem: for all of it on the stream of a tensor's GPU; on the CPU for
// ranges of `count` items of `elements` elements each.
template <class Problem>
void launch(const Problem& problem, [[maybe_unused]] const Tensor& tensor, [[maybe_unused]] int64_t count,
            [[maybe_unused]] int64_t elements) {
#if KIT_ON_GPU
  check(run(problem, current_stream(tensor)));
#else
  run_parallel(problem, count, elements);
#endif
}

// Torch allows a tensor no more dimensions than this.
constexpr size_t kMostDims = 64;

// Allocates a contiguous tensor on the device of `beside`. Cheaper than the ops in torch/csrc/stable/ops.h, which go
// through the dispatcher.
inline Tensor allocate(IntHeaderOnlyArrayRef sizes, int32_t dtype, const Tensor& beside) {
  int64_t strides[kMostDims];
  if (sizes.size() > kMostDims) throw std::runtime_error(std::string(kProject) + ": too many dimensions");
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0; stride *= sizes[dim] > 0 ? sizes[dim] : 1) strides[dim] = stride;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides, dtype,
                                                  device_type(beside), beside.get_device_index(), &handle));
  return Tensor(handle);
}

// The sizes of a tensor, with another last one.
inline std::vector<int64_t> sizes_with_last(const Tensor& tensor, int64_t last) {
  std::vector<int64_t> sizes(tensor.sizes().begin(), tensor.sizes().end());
  sizes.back() = last;
  return sizes;
}

inline Tensor allocate_like(const Tensor& tensor) { return allocate(tensor.sizes(), dtype(tensor), tensor); }

inline void fill_with_zeros(Tensor& tensor) { TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(tensor.get())); }

}  // namespace kit
