#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch_v2.h>

#include "scaled_add.h"

using torch::stable::Tensor;

template <typename T>
void run(const Tensor& a, const Tensor& b, T scale, Tensor& out) {
  const T *x = a.const_data_ptr<T>(), *y = b.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  torch::stable::parallel_for(0, a.numel(), 32768, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = x[i] + scale * y[i];
  });
}

void scaled_add_cpu(const Tensor& a, const Tensor& b, double scale, Tensor& out) {
  THO_DISPATCH_V2(a.scalar_type(), "scaled_add", AT_WRAP([&] { run<scalar_t>(a, b, scale, out); }),
                  AT_EXPAND(AT_FLOATING_TYPES));
}
