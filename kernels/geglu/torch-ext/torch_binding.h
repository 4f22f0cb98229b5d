// The operators of this kernel. What is wrong with an argument is reported as an error that names it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

using torch::stable::Tensor;

// up * gelu(gate), contiguous, where gate and up are the halves of the last dimension of x: the gate is the first or
// the second. `tanh`: gelu's approximation by it.
Tensor geglu_halves(const Tensor& x, bool tanh, bool gate_first);

// The same of two tensors.
Tensor geglu_pair(const Tensor& gate, const Tensor& up, bool tanh);

// The gradient of geglu_halves with respect to x, contiguous.
Tensor geglu_halves_backward(const Tensor& grad, const Tensor& x, bool tanh, bool gate_first);

// The gradients of geglu_pair with respect to gate and up, both contiguous.
std::tuple<Tensor, Tensor> geglu_pair_backward(const Tensor& grad, const Tensor& gate, const Tensor& up, bool tanh);
