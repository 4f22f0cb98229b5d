#include <tvm/ffi/tvm_ffi.h>

#include "scale/scale.h"

#if defined(CUDA_KERNEL)
constexpr DLDeviceType kDevice = kDLCUDA;
#else
constexpr DLDeviceType kDevice = kDLCPU;
#endif

void scaled(tvm::ffi::TensorView out, tvm::ffi::TensorView in, double factor) {
  for (tvm::ffi::TensorView tensor : {out, in}) {
    TVM_FFI_CHECK(tensor.device().device_type == kDevice, ValueError) << "expected tensors on the kernel's device";
    TVM_FFI_CHECK(tensor.dtype() == (DLDataType{kDLFloat, 32, 1}), TypeError) << "expected float32";
    TVM_FFI_CHECK(tensor.IsContiguous(), ValueError) << "expected contiguous tensors";
    TVM_FFI_CHECK(tensor.numel() == in.numel(), ValueError) << "expected tensors of one size";
  }
  scale(out, in, factor);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(scaled, scaled);
