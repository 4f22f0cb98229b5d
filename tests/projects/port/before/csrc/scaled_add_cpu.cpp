#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "scaled_add.h"

template <typename T>
void run(const at::Tensor& a, const at::Tensor& b, T scale, at::Tensor& out) {
  const T *x = a.const_data_ptr<T>(), *y = b.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  at::parallel_for(0, a.numel(), 32768, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) to[i] = x[i] + scale * y[i];
  });
}

void scaled_add_cpu(const at::Tensor& a, const at::Tensor& b, double scale, at::Tensor& out) {
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "scaled_add", [&] { run<scalar_t>(a, b, scale, out); });
}
