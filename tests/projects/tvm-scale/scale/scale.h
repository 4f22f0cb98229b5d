#pragma once

#include <tvm/ffi/container/tensor.h>

// out = factor * in, for contiguous float32 on one device.
void scale(tvm::ffi::TensorView out, tvm::ffi::TensorView in, double factor);
