// What launches share: the element type as a template argument, and the size of the device.
//
// Reads:    attributes of the current device.
// Must not: depend on what a kernel computes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kit/rows.h"

namespace kit {

template <typename T>
struct Tag {
  using Element = T;
};

// Calls `launch` with a Tag of the element type, and returns the error of what it launched.
template <typename Launch>
cudaError_t with_type(Type type, Launch&& launch) {
  switch (type) {
    case Type::float32:
      launch(Tag<float>{});
      break;
    case Type::float16:
      launch(Tag<__half>{});
      break;
    case Type::bfloat16:
      launch(Tag<__nv_bfloat16>{});
      break;
  }
  return cudaGetLastError();
}

inline cudaError_t processors_of_device(int* processors) {
  int device;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace kit
