// The operators of this kernel. What is wrong with an argument is reported as an error that names it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

using torch::stable::Tensor;

// x * rstd * weight, contiguous, where rstd = 1 / sqrt(mean(x^2) + eps) over the last dimension.
Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps);

// (rms_norm(x + residual), x + residual), both contiguous.
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                                        double eps);

// The gradients of rms_norm with respect to x (plus grad_sum, when given) and to the weight; the latter is empty unless
// `weight_grad` asks for it.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const std::optional<Tensor>& weight,
                                             const std::optional<Tensor>& grad_sum, double eps, bool weight_grad);
