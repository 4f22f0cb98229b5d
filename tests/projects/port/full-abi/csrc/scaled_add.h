#pragma once

#include <ATen/core/Tensor.h>

// out = a + scale * b
void scaled_add_cpu(const at::Tensor& a, const at::Tensor& b, double scale, at::Tensor& out);
void scaled_add_cuda(const at::Tensor& a, const at::Tensor& b, double scale, at::Tensor& out);
