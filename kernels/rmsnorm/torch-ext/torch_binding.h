// The operators of this kernel. What is wrong with an argument is reported as an error that names it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

using torch::stable::Tensor;

// x * rstd * (offset + weight), contiguous, where rstd = 1 / sqrt(mean(x^2) + eps) over the last dimension. With
// `rounded_before_weight`, x * rstd is rounded to the dtype of x, and its product with the weight to their common one.
Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps, double offset,
                bool rounded_before_weight);

// (rms_norm(x + residual), x + residual), both contiguous.
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight,
                                        double eps, double offset, bool rounded_before_weight);

// The same, written over x and the residual.
void add_rms_norm_(Tensor x, const Tensor& residual, std::optional<Tensor> weight, double eps, double offset,
                   bool rounded_before_weight);

// The gradients of rms_norm with respect to x (plus grad_sum, when given) and to the weight; the latter is empty unless
// `weight_grad` asks for it. Roundings are taken for exact.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const std::optional<Tensor>& weight,
                                             const std::optional<Tensor>& grad_sum, double eps, double offset,
                                             bool weight_grad);
