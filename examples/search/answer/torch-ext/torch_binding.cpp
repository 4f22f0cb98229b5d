#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "cpu/nearest.h"
#include "registration.h"

using torch::stable::Tensor;

namespace {

// Points for each thread at least; fewer do not repay starting a thread.
constexpr int64_t kGrain = 64;

Tensor forward(const Tensor& x, const Tensor& y) {
  for (const Tensor& points : {x, y}) {
    STD_TORCH_CHECK(points.scalar_type() == torch::headeronly::ScalarType::Float, "nearest: expected float32");
    STD_TORCH_CHECK(points.dim() == 2 && points.size(1) == 3, "nearest: expected points of three coordinates");
  }
  const Tensor from = torch::stable::contiguous(x), to = torch::stable::contiguous(y);
  Tensor distance = torch::stable::new_empty(from, {from.size(0)});
  const float* source = from.const_data_ptr<float>();
  const float* others = to.const_data_ptr<float>();
  float* target = distance.mutable_data_ptr<float>();
  torch::stable::parallel_for(0, from.size(0), kGrain, [&](int64_t begin, int64_t end) {
    nearest(source, others, to.size(0), target, begin, end);
  });
  return distance;
}

}  // namespace

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) { ops.def("nearest(Tensor x, Tensor y) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { ops.impl("nearest", TORCH_BOX(&forward)); }

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
