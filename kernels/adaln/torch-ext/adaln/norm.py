"""The public functions, and the gradients of their ops."""

from typing import Optional

import torch
from torch import Tensor, is_grad_enabled

from ._ops import ops
from .fakes import has_own_rows


def ada_layer_norm(
    x: Tensor,
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    rounding: str = "last",
) -> Tensor:
    """Return `layer_norm(x, weight, bias) * (1 + scale) + shift` over the last dimension of `x`, contiguous.

    Args:
        x: float32, float16 or bfloat16, of any shape. The elements of a row must be adjacent to be read in place; the
            other dimensions may have any strides. The same holds for `scale` and `shift`.
        scale: Of the dtype of `x` or float32. Of the shape of `x`, or with dimensions between its first ones and the
            last missing or of size 1: for `x` of `[B, S, C]`, one of `[B, S, C]`, `[B, 1, C]`, `[B, C]`, `[C]`. None,
            for `shift` as well: no modulation.
        shift: Of the dtype of `scale`, with as many rows.
        weight: `[x.shape[-1]]`, of the dtype of `x` or float32. None: no weight.
        bias: Likewise.
        eps: Added to the variance.
        rounding: `"last"` computes in float32 and rounds the result to the dtype of `x` once, like models that modulate
            in float32 (Wan). `"each"` also rounds the norm, `1 + scale` and their product, like models that modulate
            in the dtype of `x` (LTX-Video, DiT).

    All tensors get gradients, which ignore the roundings.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If `rounding` has another value.
    """
    return _call_ada_norm(x, scale, shift, weight, bias, eps, True, rounding)


def ada_rms_norm(
    x: Tensor,
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    rounding: str = "last",
) -> Tensor:
    """Return `rms_norm(x, weight) * (1 + scale) + shift`: `ada_layer_norm` without mean and bias."""
    return _call_ada_norm(x, scale, shift, weight, None, eps, False, rounding)


def gate_residual(residual: Tensor, branch: Tensor, gate: Tensor, rounding: str = "last") -> Tensor:
    """Return `residual + branch * gate`, contiguous.

    Args:
        residual: float32, float16 or bfloat16, of any shape.
        branch: Of the shape and dtype of `residual`.
        gate: As the `scale` of `ada_layer_norm`.
        rounding: `"last"` computes in float32 and rounds once. `"each"` also rounds the product.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If `rounding` has another value.
    """
    stepwise = rounding != "last" and _is_stepwise(rounding)
    if is_grad_enabled() and (residual.requires_grad or branch.requires_grad or gate.requires_grad):
        return _GateResidual.apply(residual, branch, gate, stepwise)
    return _gate_residual(residual, branch, gate, stepwise)


def gate_residual_ada_norm(
    residual: Tensor,
    branch: Tensor,
    gate: Tensor,
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    norm: str = "layer",
    rounding: str = "last",
) -> tuple[Tensor, Tensor]:
    """Return the new residual and its modulated norm: `x = gate_residual(...)` and `ada_layer_norm(x, ...)`.

    The new residual is rounded before it is normalized, as in two separate steps.

    Args:
        residual: As in `gate_residual`.
        branch: As in `gate_residual`.
        gate: As in `gate_residual`, with as many rows as `scale`.
        scale: As in `ada_layer_norm`.
        shift: As in `ada_layer_norm`.
        weight: As in `ada_layer_norm`.
        bias: As in `ada_layer_norm`.
        eps: As in `ada_layer_norm`.
        norm: `"layer"`, or `"rms"` for the norm of `ada_rms_norm`.
        rounding: As in `gate_residual` and `ada_layer_norm`.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If `norm` or `rounding` has another value.
    """
    if norm not in ("layer", "rms"):
        raise ValueError(f'adaln: norm must be "layer" or "rms", not {norm!r}')
    stepwise = rounding != "last" and _is_stepwise(rounding)
    tensors = (residual, branch, gate, scale, shift, weight, bias)
    options = (eps, norm == "layer", stepwise)
    if is_grad_enabled() and _any_requires_grad(tensors):
        return _GateResidualAdaNorm.apply(*tensors, *options)
    return _gate_residual_ada_norm(*tensors, *options)


def _call_ada_norm(x, scale, shift, weight, bias, eps, centered, rounding):
    stepwise = rounding != "last" and _is_stepwise(rounding)
    if is_grad_enabled() and _any_requires_grad((x, scale, shift, weight, bias)):
        return _AdaNorm.apply(x, scale, shift, weight, bias, eps, centered, stepwise)
    return _ada_norm(x, scale, shift, weight, bias, eps, centered, stepwise)


def _any_requires_grad(tensors):
    for tensor in tensors:  # noqa: SIM110 - `any` over a generator costs the host twice as much
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _is_stepwise(rounding: str) -> bool:
    if rounding not in ("last", "each"):
        raise ValueError(f'adaln: rounding must be "last" or "each", not {rounding!r}')
    return rounding == "each"


_ada_norm = ops.ada_norm.default
_gate_residual = ops.gate_residual.default
_gate_residual_ada_norm = ops.gate_residual_ada_norm.default
_ada_norm_backward = ops.ada_norm_backward.default
_gate_residual_backward = ops.gate_residual_backward.default


# --- gradients -------------------------------------------------------------------------------------------------------


class _Once(torch.autograd.Function):
    """Calls an op that computes gradients. A second derivative is an error."""

    @staticmethod
    def forward(ctx, op, *arguments):
        return op(*arguments)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("adaln: its gradient cannot be differentiated a second time")


def _once(op, *arguments):
    # Grad mode is on in a backward pass only with `create_graph=True`.
    return _Once.apply(op, *arguments) if is_grad_enabled() else op(*arguments)


def _norm_gradients(ctx, grad, x, scale, weight, bias, grad_sum, branch, gate, wanted):
    """Return the gradients of residual or x, branch, gate, scale, shift, weight and bias."""
    of_gate, of_scale, of_shift, of_weight, of_bias = wanted
    gradients = _once(
        _ada_norm_backward,
        grad,
        x,
        scale,
        weight,
        bias,
        grad_sum,
        branch,
        gate,
        ctx.eps,
        ctx.centered,
        of_scale or of_shift,
        of_weight or of_bias,
        of_gate,
    )
    grad_x, grad_scale, grad_shift, grad_weight, grad_bias, grad_branch, grad_gate = gradients
    # `reshape` costs the host as much as a launch, even if the shape stays.
    if of_shift and grad_shift.shape != ctx.shift_shape:
        grad_shift = (grad.to(scale.dtype) if has_own_rows(scale, x) else grad_shift).reshape(ctx.shift_shape)
    return (
        grad_x,
        None if branch is None else grad_branch,
        grad_gate if of_gate else None,
        grad_scale if of_scale else None,
        grad_shift if of_shift else None,
        grad_weight if of_weight else None,
        grad_bias if of_bias else None,
    )


class _AdaNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, shift, weight, bias, eps, centered, stepwise):
        ctx.save_for_backward(x, scale, weight, bias)
        ctx.eps, ctx.centered = eps, centered
        ctx.shift_shape = None if shift is None else shift.shape
        return _ada_norm(x, scale, shift, weight, bias, eps, centered, stepwise)

    @staticmethod
    def backward(ctx, grad):
        x, scale, weight, bias = ctx.saved_tensors
        wanted = (False, *ctx.needs_input_grad[1:5])
        gradients = _norm_gradients(ctx, grad, x, scale, weight, bias, None, None, None, wanted)
        return (gradients[0], *gradients[3:], None, None, None)


class _GateResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, branch, gate, stepwise):
        ctx.save_for_backward(branch, gate)
        return _gate_residual(residual, branch, gate, stepwise)

    @staticmethod
    def backward(ctx, grad):
        _, of_branch, of_gate, _ = ctx.needs_input_grad
        if not of_branch and not of_gate:
            return grad, None, None, None
        branch, gate = ctx.saved_tensors
        grad_branch, grad_gate = _once(_gate_residual_backward, grad, branch, gate, of_gate)
        return grad, grad_branch, grad_gate if of_gate else None, None


class _GateResidualAdaNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, branch, gate, scale, shift, weight, bias, eps, centered, stepwise):
        arguments = (residual, branch, gate, scale, shift, weight, bias, eps, centered, stepwise)
        total, normed = _gate_residual_ada_norm(*arguments)
        ctx.save_for_backward(total, branch, gate, scale, weight, bias)
        ctx.eps, ctx.centered = eps, centered
        ctx.shift_shape = None if shift is None else shift.shape
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx, grad_sum, grad):
        total, branch, gate, scale, weight, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:7]
        if grad is None:
            grad_branch, grad_gate = _once(_gate_residual_backward, grad_sum, branch, gate, wanted[0])
            return grad_sum, grad_branch, grad_gate if wanted[0] else None, *[None] * 7
        gradients = _norm_gradients(ctx, grad, total, scale, weight, bias, grad_sum, branch, gate, wanted)
        return (*gradients, None, None, None)
