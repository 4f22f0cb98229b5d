// The operators of this kernel. What is wrong with an argument is reported as an error that names it.
//
// Scale, shift and gate have a row for each row of x, or for each index of its first dimensions; in x's dtype or
// float32.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// (n * weight + bias) * (1 + scale) + shift, contiguous, where n is x normalized over the last dimension: centered, as
// LayerNorm does it, or not, as RMSNorm does. In float32, and rounded once; or stepwise, to x's dtype: after
// n * weight + bias, 1 + scale, and their product, too.
Tensor ada_norm(const Tensor& x, const MaybeTensor& scale, const MaybeTensor& shift, const MaybeTensor& weight,
                const MaybeTensor& bias, double eps, bool centered, bool stepwise);

// residual + branch * gate, contiguous; the product rounded, too, where it is stepwise.
Tensor gate_residual(const Tensor& residual, const Tensor& branch, const Tensor& gate, bool stepwise);

// (gate_residual, ada_norm of it), both contiguous.
std::tuple<Tensor, Tensor> gate_residual_ada_norm(const Tensor& residual, const Tensor& branch, const Tensor& gate,
                                                  const MaybeTensor& scale, const MaybeTensor& shift,
                                                  const MaybeTensor& weight, const MaybeTensor& bias, double eps,
                                                  bool centered, bool stepwise);

// The gradients of ada_norm with respect to x (plus grad_sum, when given), scale, shift, weight and bias; and with a
// gate, where x is the new residual and its gradient the residual's, to branch and gate. Those that are not asked for,
// or do not exist, are empty; so is that of a shift that has a row for each row of x, since it equals `grad`.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> ada_norm_backward(
    const Tensor& grad, const Tensor& x, const MaybeTensor& scale, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& grad_sum, const MaybeTensor& branch, const MaybeTensor& gate, double eps, bool centered,
    bool modulation_grad, bool parameter_grad, bool gate_grad);

// The gradients of gate_residual with respect to branch and gate; the latter is empty unless `gate_grad` asks for it.
std::tuple<Tensor, Tensor> gate_residual_backward(const Tensor& grad, const Tensor& branch, const Tensor& gate,
                                                  bool gate_grad);
