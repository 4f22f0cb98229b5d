"""The public functions, and the gradients of their ops."""

from typing import Optional

import torch
from torch import Tensor, is_grad_enabled

from . import formulas
from ._ops import ops
from .derivatives import FORWARD_AD, LEVEL, gradients, raise_unless_transformed


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
        TypeError: If an argument has a wrong type; the message names it.
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If `rounding` has another value.
    """
    stepwise = rounding != "last" and _is_stepwise(rounding)
    try:
        if FORWARD_AD[LEVEL] < 0:
            if is_grad_enabled() and _any_requires_grad((x, scale, shift, weight, bias)):
                return _AdaNorm.apply(x, scale, shift, weight, bias, (eps, True, stepwise))
            return _ada_norm(x, scale, shift, weight, bias, eps, True, stepwise)
    except Exception as error:
        raise_unless_transformed(error, ada_layer_norm, locals())
    return formulas.ada_norm(x, scale, shift, weight, bias, eps, True, stepwise)


def ada_rms_norm(
    x: Tensor,
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    weight: Optional[Tensor] = None,
    eps: float = 1e-6,
    rounding: str = "last",
) -> Tensor:
    """Return `rms_norm(x, weight) * (1 + scale) + shift`: `ada_layer_norm` without mean and bias."""
    stepwise = rounding != "last" and _is_stepwise(rounding)
    try:
        if FORWARD_AD[LEVEL] < 0:
            if is_grad_enabled() and _any_requires_grad((x, scale, shift, weight)):
                return _AdaNorm.apply(x, scale, shift, weight, None, (eps, False, stepwise))
            return _ada_norm(x, scale, shift, weight, None, eps, False, stepwise)
    except Exception as error:
        raise_unless_transformed(error, ada_rms_norm, locals())
    return formulas.ada_norm(x, scale, shift, weight, None, eps, False, stepwise)


def gate_residual(residual: Tensor, branch: Tensor, gate: Tensor, rounding: str = "last") -> Tensor:
    """Return `residual + branch * gate`, contiguous.

    Args:
        residual: float32, float16 or bfloat16, of any shape.
        branch: Of the shape and dtype of `residual`.
        gate: As the `scale` of `ada_layer_norm`.
        rounding: `"last"` computes in float32 and rounds once. `"each"` also rounds the product.

    Raises:
        TypeError, RuntimeError, ValueError: As `ada_layer_norm`.
    """
    stepwise = rounding != "last" and _is_stepwise(rounding)
    try:
        if FORWARD_AD[LEVEL] < 0:
            if is_grad_enabled() and (residual.requires_grad or branch.requires_grad or gate.requires_grad):
                return _GateResidual.apply(residual, branch, gate, stepwise)
            return _gate_residual(residual, branch, gate, stepwise)
    except Exception as error:
        raise_unless_transformed(error, gate_residual, locals())
    return formulas.gate_residual(residual, branch, gate, stepwise)


def gate_residual_ada_norm(
    residual: Tensor,
    branch: Tensor,
    gate: Optional[Tensor],
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
        residual, branch: As in `gate_residual`.
        gate: As in `gate_residual`, with as many rows as `scale`. Where one of them has fewer rows, expand it:
            `gate.expand(x.shape)`. None: no gate, as in `add_ada_norm`.
        scale, shift, weight, bias, eps: As in `ada_layer_norm`.
        norm: `"layer"`, or `"rms"` for the norm of `ada_rms_norm`.
        rounding: As in `gate_residual` and `ada_layer_norm`.

    Raises:
        TypeError, RuntimeError, ValueError: As `ada_layer_norm`; ValueError also if `norm` has another value.
    """
    if norm not in ("layer", "rms"):
        raise ValueError(f'adaln: norm must be "layer" or "rms", not {norm!r}')
    stepwise = rounding != "last" and _is_stepwise(rounding)
    centered = norm == "layer"
    try:
        if FORWARD_AD[LEVEL] < 0:
            if is_grad_enabled() and _any_requires_grad((residual, branch, gate, scale, shift, weight, bias)):
                options = (eps, centered, stepwise)
                return _GateResidualAdaNorm.apply(residual, branch, gate, scale, shift, weight, bias, options)
            if weight is None and bias is None:
                return _gate_residual_ada_norm(residual, branch, gate, scale, shift, eps, centered, stepwise)
            return _gate_residual_ada_norm(residual, branch, gate, scale, shift, eps, centered, stepwise, weight, bias)
    except Exception as error:
        raise_unless_transformed(error, gate_residual_ada_norm, locals())
    return formulas.gate_residual_ada_norm(residual, branch, gate, scale, shift, eps, centered, stepwise, weight, bias)


def add_ada_norm(
    residual: Tensor,
    branch: Tensor,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    eps: float = 1e-6,
    norm: str = "layer",
    rounding: str = "last",
) -> tuple[Tensor, Tensor]:
    """Return the new residual and its modulated norm: `x = residual + branch` and `ada_layer_norm(x, ...)`.

    This is `gate_residual_ada_norm` without a gate; the arguments and errors are the same. The new residual is rounded
    before it is normalized, as in two separate steps.
    """
    return gate_residual_ada_norm(residual, branch, None, scale, shift, weight, bias, eps, norm, rounding)


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


def _gradient_of_shift(ctx, grad, grad_shift, scale):
    if grad_shift is None:  # every row of x has its own row of shift
        grad_shift = grad.to(scale.dtype)
    # `reshape` costs the host as much as a launch, even if the shape stays.
    return grad_shift if grad_shift.shape == ctx.shift_shape else grad_shift.reshape(ctx.shift_shape)


def _norm_gradients(ctx, x, scale, weight, bias, grad):
    """Return the gradients of x, scale, shift, weight and bias, which can be differentiated again."""
    # They depend on scale, and not on shift.
    shift = None if scale is None else scale.new_zeros(ctx.shift_shape)
    return gradients(formulas.ada_norm, (x, scale, shift, weight, bias), ctx.options, (grad,))


def _gate_gradients(grad, branch, gate):
    """Return the gradients of residual, branch and gate, which can be differentiated again."""
    if gate is None:
        return grad, grad, None
    # They do not depend on the residual.
    return gradients(formulas.gate_residual, (torch.zeros_like(branch), branch, gate), (False,), (grad,))


# In the functions below, the options of an op go as a tuple: each argument of `apply` costs the host time, forward and
# backward.


class _AdaNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, shift, weight, bias, options):
        ctx.save_for_backward(x, scale, weight, bias)
        ctx.options = options
        ctx.shift_shape = None if shift is None else shift.shape
        return _ada_norm(x, scale, shift, weight, bias, *options)

    @staticmethod
    def backward(ctx, grad):
        x, scale, weight, bias = ctx.saved_tensors
        _, of_scale, of_shift, of_weight, of_bias, _ = ctx.needs_input_grad
        if is_grad_enabled():  # in a backward pass only with `create_graph=True`
            return *_norm_gradients(ctx, x, scale, weight, bias, grad), None
        eps, centered, _ = ctx.options
        grad_x, grad_scale, grad_shift, grad_weight, grad_bias, _, _ = _ada_norm_backward(
            grad, x, scale, weight, bias, eps, centered, of_scale or of_shift, of_weight or of_bias
        )
        if of_shift:
            grad_shift = _gradient_of_shift(ctx, grad, grad_shift, scale)
        return grad_x, grad_scale, grad_shift, grad_weight, grad_bias, None


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
        if is_grad_enabled():  # in a backward pass only with `create_graph=True`
            return *_gate_gradients(grad, *ctx.saved_tensors), None
        return grad, *_gate_residual_backward(grad, *ctx.saved_tensors, of_gate), None


class _GateResidualAdaNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, branch, gate, scale, shift, weight, bias, options):
        total, normed = _gate_residual_ada_norm(residual, branch, gate, scale, shift, *options, weight, bias)
        ctx.save_for_backward(total, None if gate is None else branch, gate, scale, weight, bias)
        ctx.options = options
        ctx.shift_shape = None if shift is None else shift.shape
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx, grad_sum, grad):
        total, branch, gate, scale, weight, bias = ctx.saved_tensors
        _, _, of_gate, of_scale, of_shift, of_weight, of_bias, _ = ctx.needs_input_grad
        if is_grad_enabled():  # in a backward pass only with `create_graph=True`
            of_norm = [None] * 5 if grad is None else _norm_gradients(ctx, total, scale, weight, bias, grad)
            grad_total = sum(gradient for gradient in (of_norm[0], grad_sum) if gradient is not None)
            return *_gate_gradients(grad_total, branch, gate), *of_norm[1:], None
        if grad is None:
            if gate is None:
                return grad_sum, grad_sum, *[None] * 6
            return grad_sum, *_gate_residual_backward(grad_sum, branch, gate, of_gate), *[None] * 5
        eps, centered, _ = ctx.options
        arguments = (grad, total, scale, weight, bias, eps, centered, of_scale or of_shift, of_weight or of_bias)
        gated = () if gate is None else (branch, gate, of_gate)
        grad_x, grad_scale, grad_shift, grad_weight, grad_bias, grad_branch, grad_gate = _ada_norm_backward(
            *arguments, grad_sum, *gated
        )
        if gate is None:
            grad_branch = grad_x
        if of_shift:
            grad_shift = _gradient_of_shift(ctx, grad, grad_shift, scale)
        return grad_x, grad_branch, grad_gate, grad_scale, grad_shift, grad_weight, grad_bias, None
