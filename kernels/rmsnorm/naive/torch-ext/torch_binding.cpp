// Binds the naive kernel to Torch through its stable ABI, as of Torch 2.10.
#include "kit/tensors.h"
#include "registration.h"

const char* const kit::kProject = "rmsnorm-naive";

// In rmsnorm.cu.
namespace naive {
int rms_norm(kit::Type type, const void* x, const void* weight, void* normed, int64_t rows, int64_t hidden, float eps,
             void* stream);
}

namespace {

using namespace kit;

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  check_backend(x, "x");
  const Type type = element_type(x, "x");
  if (x.dim() == 0) fail("x", "must have at least one dimension");
  const int64_t hidden = x.size(x.dim() - 1);
  check_device(weight, "weight", x);
  if (weight.dim() != 1 || weight.size(0) != hidden || dtype(weight) != dtype(x)) {
    fail("weight", "must be one row of x, and have its dtype");
  }
  const auto device = enter(x);
  x = torch::stable::contiguous(x);
  weight = torch::stable::contiguous(weight);
  Tensor normed = allocate_like(x);
  if (x.numel() == 0) return normed;
  check(naive::rms_norm(type, x.const_data_ptr(), weight.const_data_ptr(), normed.mutable_data_ptr(),
                        x.numel() / hidden, hidden, static_cast<float>(eps), current_stream(x)));
  return normed;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { ops.impl("rms_norm", TORCH_BOX(&rms_norm)); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
