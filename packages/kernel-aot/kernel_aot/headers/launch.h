// Launches kernels that Triton compiled ahead of time, and checks tensors on Torch's stable ABI.
//
// Nothing is loaded before the first launch on a device.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>

#include "aot/driver.h"

#ifdef USE_ROCM
// shim.h declares it for CUDA only; Torch for ROCm has it, too.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace aot {

using torch::stable::Tensor;

// Makes a device the current one. It usually is: a guard would take the host 0.7 us.
class Device {
 public:
  explicit Device(int32_t index) {
    if (torch::stable::accelerator::getCurrentDeviceIndex() != index) guard_.emplace(index);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// Expressions, as in Python.
inline int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) fail("division by zero");
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
inline int64_t modulo(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }
inline int64_t cdiv(int64_t a, int64_t b) { return -floor_div(-a, b); }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }
inline int64_t next_power_of_2(int64_t n) {
  int64_t power = n > 0;  // 0 as in Triton
  while (power < n) power *= 2;
  return power;
}

inline int64_t dim(const Tensor& tensor) { return tensor.dim(); }
inline int64_t numel(const Tensor& tensor) { return tensor.numel(); }
inline int64_t position(const Tensor& tensor, int64_t index) {
  const int64_t wrapped = index < 0 ? index + tensor.dim() : index;
  if (wrapped < 0 || wrapped >= tensor.dim()) {
    fail("a tensor with " + std::to_string(tensor.dim()) + " dimensions has no dimension " + std::to_string(index));
  }
  return wrapped;
}
inline int64_t size(const Tensor& tensor, int64_t index) { return tensor.size(position(tensor, index)); }
inline int64_t stride(const Tensor& tensor, int64_t index) { return tensor.stride(position(tensor, index)); }
inline int64_t element_size(const Tensor& tensor) { return tensor.element_size(); }

inline int32_t dtype(const Tensor& tensor) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  return code;
}

#define AOT_DTYPE(NAME) \
  inline int32_t dtype_##NAME() { return aoti_torch_dtype_##NAME(); }
AOT_DTYPE(float16);
AOT_DTYPE(bfloat16);
AOT_DTYPE(float32);
AOT_DTYPE(float64);
AOT_DTYPE(int8);
AOT_DTYPE(int16);
AOT_DTYPE(int32);
AOT_DTYPE(int64);
AOT_DTYPE(uint8);
AOT_DTYPE(bool);
AOT_DTYPE(float8_e4m3fn);
AOT_DTYPE(float8_e5m2);
#undef AOT_DTYPE

// Throws unless the tensor is on the CUDA device of `first`.
inline void check_device(const Tensor& tensor, const char* name, const Tensor& first, const char* first_name) {
  if (!tensor.is_cuda()) fail(std::string(name) + " must be on a CUDA device");
  if (tensor.get_device_index() != first.get_device_index()) {
    fail(std::string(name) + " must be on the device of " + first_name);
  }
}

inline void check_contiguous(const Tensor& tensor, const char* name) {
  if (!tensor.is_contiguous()) fail(std::string(name) + " must be contiguous");
}

inline void check_dtype(int32_t code, const char* name, int32_t expected, const char* text) {
  if (code != expected) fail(std::string(name) + " must be " + text);
}

// Returns the position of a dtype in a list.
inline int dtype_index(int32_t code, const char* name, std::initializer_list<int32_t> codes, const char* text) {
  int index = 0;
  for (const int32_t known : codes) {
    if (code == known) return index;
    ++index;
  }
  fail(std::string(name) + " must be " + text);
}

inline void require(bool holds, const char* condition, std::initializer_list<int64_t> values) {
  if (holds) return;
  std::string text;
  for (const int64_t value : values) text += (text.empty() ? "" : " and ") + std::to_string(value);
  fail(std::string("expected ") + condition + (text.empty() ? "" : ", got " + text));
}

inline int32_t int32(int64_t value, const char* name) {
  if (value != static_cast<int32_t>(value)) {
    fail(std::string(name) + " is " + std::to_string(value) + ", and the kernel takes 32-bit integers");
  }
  return static_cast<int32_t>(value);
}

inline bool is_int32(int64_t value) { return value == static_cast<int32_t>(value); }
inline bool divisible(int64_t value) { return value % 16 == 0; }
inline bool divisible(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline void* current_stream(int device) {
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

// Allocates a contiguous tensor on the device of another one, which is the current device.
inline Tensor allocate(const int64_t* sizes, size_t dims, int32_t code, const Tensor& beside, bool zeros) {
  constexpr size_t kMostDims = 64;
  int64_t strides[kMostDims];
  if (dims > kMostDims) fail("too many dimensions");
  int64_t stride = 1;
  for (size_t dim = dims; dim-- > 0; stride *= sizes[dim] > 0 ? sizes[dim] : 1) {
    if (sizes[dim] < 0) fail("an output has the size " + std::to_string(sizes[dim]));
    strides[dim] = stride;
  }
  int32_t type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(beside.get(), &type));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(dims), sizes, strides, code, type,
                                                  beside.get_device_index(), &handle));
  const Tensor tensor(handle);
  if (!zeros || tensor.numel() == 0) return tensor;
  // A call of memset takes the host 2 us, and zero_ 9; in a graph, memset's node takes the device 1 us longer.
  void* stream = current_stream(beside.get_device_index());
  if (is_captured(stream)) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(handle));
  } else {
    fill_with_zeros(tensor.mutable_data_ptr(), tensor.numel() * tensor.element_size(), stream);
  }
  return tensor;
}

inline Tensor allocate(std::initializer_list<int64_t> sizes, int32_t code, const Tensor& beside, bool zeros) {
  return allocate(sizes.begin(), sizes.size(), code, beside, zeros);
}

inline Tensor allocate_like(const Tensor& tensor, const char* name, int32_t code, bool zeros) {
  check_contiguous(tensor, name);
  const auto sizes = tensor.sizes();
  return allocate(sizes.data(), sizes.size(), code, tensor, zeros);
}

// Launches a kernel on the current stream of a tensor's device, which is the current one. `arguments` are pointers to
// the kernel's arguments, with two places for Triton's own at the end.
template <size_t kCount>
void launch(Kernel& kernel, const Tensor& beside, int64_t x, int64_t y, int64_t z, void* (&arguments)[kCount]) {
  if (x <= 0 || y <= 0 || z <= 0) return;
  if (y > 65535 || z > 65535) fail("the grid has more than 65535 blocks in its second or third dimension");
  const int device = beside.get_device_index();
  if (device >= kDevices) fail("a machine with more than 64 GPUs");
  Function function = kernel.loaded[device].load(std::memory_order_acquire);
  if (function == nullptr) function = load(kernel, device);
  const Image& image = *kernel.chosen[device];
  void* scratch = nullptr;
  void* profile = nullptr;
  Tensor memory;
  if (image.scratch > 0) {
    memory = allocate({image.scratch * x * y * z}, dtype_uint8(), beside, false);
    scratch = memory.mutable_data_ptr();
  }
  arguments[kCount - 2] = &scratch;
  arguments[kCount - 1] = &profile;
  const unsigned grid[] = {static_cast<unsigned>(int32(x, "the grid")), static_cast<unsigned>(y),
                           static_cast<unsigned>(z)};
  start(image, function, device, grid, current_stream(device), arguments);
}

}  // namespace aot
