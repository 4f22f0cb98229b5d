#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "cpu/hard_swish.h"
#include "registration.h"

using torch::stable::Tensor;

namespace {

// Elements for each thread at least; fewer do not repay starting a thread.
constexpr int64_t kGrain = 32768;

Tensor forward(const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, "hard_swish: expected float32");
  const Tensor from = torch::stable::contiguous(x);
  Tensor y = torch::stable::empty_like(from);
  const float* source = from.const_data_ptr<float>();
  float* target = y.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, from.numel(), kGrain,
                              [&](int64_t begin, int64_t end) { hard_swish(source, target, begin, end); });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("hard_swish(Tensor x) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { ops.impl("hard_swish", TORCH_BOX(&forward)); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
