// Launches kernels that CuTe DSL compiled ahead of time. The compiled host function computes the grid and the
// arguments.
#pragma once

#include <cstring>
#include <type_traits>

#include "aot/launch.h"

namespace aot {

// The compiled host function of a configuration, and its kernels. The arguments point to tensors, numbers and the
// stream.
struct Host {
  uint32_t (*function)(Kernel* kernels, int device, const void* const* arguments);
  Kernel* kernels;
};

// Values in memory. `Bytes` is a struct or an array.
using Pointer = char*;
template <size_t kSize>
struct Bytes {
  char bytes[kSize];
};
template <class Value>
Value load(const void* from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class Value>
void store(void* to, Value value) {
  std::memcpy(to, &value, sizeof value);
}

// Arithmetic of signed and unsigned integers.
template <class Value>
auto as_signed(Value value) {
  return static_cast<std::make_signed_t<Value>>(value);
}
inline int as_signed(bool value) { return value ? -1 : 0; }
template <class Value>
Value quotient(Value a, Value b) {
  if (b == 0) fail("division by zero");
  return a / b;
}
template <class Value>
Value remainder(Value a, Value b) {
  if (b == 0) fail("division by zero");
  return a % b;
}

inline void* current_stream(const Tensor& tensor) {
  void* stream;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}

// Launches a kernel by a cudaLaunchConfig_t of the host function, with pointers to the kernel's arguments.
inline uint32_t launch(Kernel& kernel, int device, const void* configuration, void* arguments) {
  const auto from = load<cudaLaunchConfig_t>(configuration);
  if (from.gridDim.x == 0 || from.gridDim.y == 0 || from.gridDim.z == 0) return 0;
  if (device >= kDevices) fail("a machine with more than 64 GPUs");
  CUkernel function = kernel.loaded[device].load(std::memory_order_acquire);
  if (function == nullptr) function = load(kernel, device);
  static_assert(sizeof(cudaLaunchAttribute) == sizeof(CUlaunchAttribute));
  const CUlaunchConfig to{from.gridDim.x,
                          from.gridDim.y,
                          from.gridDim.z,
                          from.blockDim.x,
                          from.blockDim.y,
                          from.blockDim.z,
                          static_cast<unsigned>(from.dynamicSmemBytes),
                          from.stream,
                          reinterpret_cast<CUlaunchAttribute*>(from.attrs),
                          from.numAttrs};
  static const auto start = [] {
    decltype(&cuLaunchKernelEx) found;
    find(&found, "cuLaunchKernelEx");
    return found;
  }();
  const auto attempt = [&] {
    return start(&to, reinterpret_cast<CUfunction>(function), static_cast<void**>(arguments), nullptr);
  };
  CUresult error = attempt();
  if (error == CUDA_ERROR_INVALID_CONTEXT) {  // a new thread has no context before its first call of the runtime
    cudaSetDevice(device);
    error = attempt();
  }
  check(error, kernel.chosen[device]->name);
  return 0;
}

}  // namespace aot
