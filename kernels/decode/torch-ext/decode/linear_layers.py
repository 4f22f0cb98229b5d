"""Linear layers of few rows: the public functions, and the fakes of their ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops
from .dispatch import DEVICE, has_tensor_cores, is_for_torch


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    norm: tuple[Tensor, float, float] | None = None,
    constant_weights: bool = False,
) -> Tensor:
    """Return `x @ weight.T + bias + residual`, contiguous, rounded once.

    Args:
        x: float32, float16 or bfloat16, [..., inputs].
        weight: [outputs, inputs], of the dtype of `x`. The elements of a row must be adjacent to be read in place.
        bias: [outputs], of the dtype of `x`.
        residual: [..., outputs], of the dtype of `x`.
        norm: A weight, eps and an offset: each row of `x` is first divided by the root of the mean of its squares, plus
            eps, and multiplied with the offset (1 for Gemma, else 0) plus the weight, [inputs], of the dtype of `x`.
            Models round both results; the kernel rounds `x` times that factor.
        constant_weights: Whether no kernel that may still run writes `weight`. On CUDA reading it then begins before
            earlier kernels of the stream end. True of the parameters of a model in inference.

    With at most eight rows in `x`, the kernel computes it in float32, and reads each weight once. With more rows, in
    autocast, in forward-mode differentiation, and where a tensor needs a gradient, `torch.nn.functional` computes it.
    Torch operations compute a norm but of bfloat16 on CUDA, at most 18,432 elements, in rows of a multiple of 8.

    Raises:
        RuntimeError: If a tensor has a wrong shape, dtype or device; the message names it.
    """
    by_torch = x.numel() > _MOST_ROWS * weight.shape[-1] or is_for_torch(x, weight, bias, residual, norm and norm[0])
    x, given = _prepare_norm(by_torch, x, norm)
    if by_torch:
        return _linear_by_torch(x, weight, bias, residual)
    if constant_weights or given:
        return _linear(x, weight, bias, residual, None, None, None, None, constant_weights, *given)
    if residual is not None:
        return _linear(x, weight, bias, residual)
    return _linear(x, weight) if bias is None else _linear(x, weight, bias)


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    norm: tuple[Tensor, float, float] | None = None,
    constant_weights: bool = False,
) -> tuple[Tensor, ...]:
    """Return `linear(x, weight, bias)` for each of one to three weights, by one kernel.

    The results are views of one tensor where the kernel computes them, next to each other in its last dimension.

    Args:
        x: As in `linear`.
        weights: One to three, each as in `linear`.
        biases: One for each weight, or None.
        norm, constant_weights: As in `linear`.

    Raises:
        ValueError: If there are no weights or more than three, or if there are not as many biases.
        RuntimeError: If a tensor has a wrong shape, dtype or device; the message names it.
    """
    count = len(weights)
    if not 1 <= count <= 3:
        raise ValueError(f"decode: weights must be one to three tensors, not {count}")
    if biases is None:
        biases = (None,) * count
    elif len(biases) != count:
        raise ValueError(f"decode: biases must be {count}, one for each weight, not {len(biases)}")
    by_torch = x.numel() > _MOST_ROWS * weights[0].shape[-1] or is_for_torch(x, *weights, *biases, norm and norm[0])
    x, given = _prepare_norm(by_torch, x, norm)
    if by_torch:
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases))
    further = [tensor for pair in zip(weights[1:], biases[1:]) for tensor in pair]
    if constant_weights or given:
        further += [None] * (4 - len(further))
        out = _linear(x, weights[0], biases[0], None, *further, constant_weights, *given)
    else:
        out = _linear(x, weights[0], biases[0], None, *further)
    if count == 1:
        return (out,)
    return out.split([weight.shape[0] for weight in weights], -1)


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    norm: tuple[Tensor, float, float] | None = None,
    constant_weights: bool = False,
) -> Tensor:
    """Return `activation(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias)`, contiguous, rounded once.

    Models that round the two products and the activation get results that are a few units in the last place from these,
    which are closer to float32.

    Args:
        x: As in `linear`.
        gate_weight: As `weight` in `linear`.
        up_weight: Of the shape of `gate_weight`.
        gate_bias: As `bias` in `linear`.
        up_bias: The same.
        activation: `"silu"`, `"gelu"` (exact, with erf) or `"gelu_tanh"` (its approximation).
        norm, constant_weights: As in `linear`.

    With more than eight rows, in autocast and for derivatives, as in `linear`, `torch.nn.functional` computes it.

    Raises:
        ValueError: If `activation` has another value.
        RuntimeError: If a tensor has a wrong shape, dtype or device; the message names it.
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"decode: activation must be one of {sorted(_ACTIVATIONS)}, not {activation!r}")
    number = _ACTIVATIONS[activation]
    tensors = x, gate_weight, up_weight, gate_bias, up_bias, norm and norm[0]
    by_torch = x.numel() > _MOST_ROWS * gate_weight.shape[-1] or is_for_torch(*tensors)
    x, given = _prepare_norm(by_torch, x, norm)
    if by_torch:
        return _gated_linear_by_torch(x, gate_weight, up_weight, number, gate_bias, up_bias)
    if gate_bias is None and up_bias is None and not constant_weights and not given:
        return _gated_linear(x, gate_weight, up_weight, number)
    return _gated_linear(x, gate_weight, up_weight, number, gate_bias, up_bias, constant_weights, *given)


# `kMostRows`, `kMostNormed` and the numbers of `Activation` in decode/problem.h.
_MOST_ROWS, _MOST_NORMED = 8, 18432
_ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3}

_linear = ops.linear.default
_gated_linear = ops.gated_linear.default


# --- by Torch --------------------------------------------------------------------------------------------------------


def can_normalize(x: Tensor) -> bool:
    """Return whether the kernels on CUDA normalize `x`, whose rows are in shared memory then."""
    return x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0 and x.numel() <= _MOST_NORMED and has_tensor_cores(x)


def _prepare_norm(by_torch, x, norm):
    """Return x and the norm's arguments for the kernel, if any; or x normalized by Torch operations."""
    if norm is None:
        return x, ()
    weight, eps, offset = norm
    if not by_torch and DEVICE == "cuda" and can_normalize(x):
        return x, norm
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + offset)).to(x.dtype), ()


def _linear_by_torch(x, weight, bias, residual):
    out = F.linear(x, weight, bias)
    if residual is not None and residual.shape != out.shape:
        raise RuntimeError(f"decode: residual must have shape {[*out.shape]}, not {[*residual.shape]}")
    return out if residual is None else out + residual


def _gated_linear_by_torch(x, gate_weight, up_weight, activation, gate_bias, up_bias):
    gate = F.linear(x, gate_weight, gate_bias)
    if activation == _ACTIVATIONS["silu"]:
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="tanh" if activation == _ACTIVATIONS["gelu_tanh"] else "none")
    return gate * F.linear(x, up_weight, up_bias)


# --- fakes -----------------------------------------------------------------------------------------------------------


# They state the shapes and dtypes of results; the binding checks the arguments.


@torch.library.register_fake(add_op_namespace_prefix("linear"))
def _linear_fake(x, weight, bias=None, residual=None, weight2=None, bias2=None, weight3=None, bias3=None, *options):
    outputs = sum(layer.shape[0] for layer in (weight, weight2, weight3) if layer is not None)
    return x.new_empty([*x.shape[:-1], outputs])


@torch.library.register_fake(add_op_namespace_prefix("gated_linear"))
def _gated_linear_fake(x, gate_weight, *options):
    return x.new_empty([*x.shape[:-1], gate_weight.shape[0]])
