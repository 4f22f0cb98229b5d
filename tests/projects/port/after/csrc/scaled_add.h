#pragma once

#include <torch/csrc/stable/tensor.h>

// out = a + scale * b
void scaled_add_cpu(const torch::stable::Tensor& a, const torch::stable::Tensor& b, double scale,
                    torch::stable::Tensor& out);
void scaled_add_cuda(const torch::stable::Tensor& a, const torch::stable::Tensor& b, double scale,
                     torch::stable::Tensor& out);
