"""The operators as functions, and what Torch must know about them to trace and differentiate them."""

from typing import Optional

import torch

from ._dispatch import differentiable, differentiable_once
from ._ops import add_op_namespace_prefix


def ada_layer_norm(
    x: torch.Tensor,
    scale: Optional[torch.Tensor],
    shift: Optional[torch.Tensor],
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    rounding: str = "last",
) -> torch.Tensor:
    """Returns `layer_norm(x, weight, bias) * (1 + scale) + shift`, over the last dimension of `x`, contiguous.

    Args:
        x: float32, float16 or bfloat16, of any shape. Only the elements of a row need to be adjacent: other strides
            are read as they are. So are those of `scale` and `shift`.
        scale: Of the shape of `x`, or with 1 or nothing in place of dimensions between its first ones and the last:
            for `x` of `[B, S, C]`, one of `[B, S, C]`, `[B, 1, C]`, `[B, C]`, `[C]`. Of the dtype of `x` or float32.
            None, for `shift` as well: no modulation.
        shift: Of the dtype of `scale`, and with as many rows.
        weight: One factor for each element of a row, of the dtype of `x` or float32. None: no factor.
        bias: One summand for each element of a row, likewise.
        eps: Added to the variance.
        rounding: "last": the arithmetic is float32, and the result is rounded to the dtype of `x` once, as in models
            that modulate in float32 (Wan). "each": the norm, `1 + scale` and their product are rounded to that dtype,
            too, as in models that modulate in it (LTX-Video, DiT).

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If `rounding` is neither "last" nor "each".
    """
    return _ada_norm(x, scale, shift, weight, bias, eps, True, rounding != "last" and _stepwise(rounding))


def ada_rms_norm(
    x: torch.Tensor,
    scale: Optional[torch.Tensor],
    shift: Optional[torch.Tensor],
    weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    rounding: str = "last",
) -> torch.Tensor:
    """Returns `rms_norm(x, weight) * (1 + scale) + shift`: as `ada_layer_norm`, without mean and bias."""
    return _ada_norm(x, scale, shift, weight, None, eps, False, rounding != "last" and _stepwise(rounding))


def gate_residual(
    residual: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, rounding: str = "last"
) -> torch.Tensor:
    """Returns `residual + branch * gate`, contiguous.

    Args:
        residual: float32, float16 or bfloat16, of any shape.
        branch: Of the shape and dtype of `residual`.
        gate: As the `scale` of `ada_layer_norm`.
        rounding: "last": computed in float32 and rounded once. "each": the product is rounded, too.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If `rounding` is neither "last" nor "each".
    """
    return _gate_residual(residual, branch, gate, rounding != "last" and _stepwise(rounding))


def gate_residual_ada_norm(
    residual: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor,
    scale: Optional[torch.Tensor],
    shift: Optional[torch.Tensor],
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    norm: str = "layer",
    rounding: str = "last",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the new residual and its modulated norm: `x = gate_residual(...)` and `ada_layer_norm(x, ...)`.

    The new residual is rounded before it is normalized, as if the two steps were taken one by one.

    Args:
        residual: As in `gate_residual`.
        branch: As in `gate_residual`.
        gate: As in `gate_residual`, with as many rows as `scale`.
        scale: As in `ada_layer_norm`.
        shift: As in `ada_layer_norm`.
        weight: As in `ada_layer_norm`.
        bias: As in `ada_layer_norm`.
        eps: As in `ada_layer_norm`.
        norm: "layer", or "rms" for the norm of `ada_rms_norm`.
        rounding: As in `gate_residual` and `ada_layer_norm`.

    Raises:
        RuntimeError: If an argument has a wrong shape, dtype or device; the message names it.
        ValueError: If `norm` is neither "layer" nor "rms", or `rounding` neither "last" nor "each".
    """
    if norm not in ("layer", "rms"):
        raise ValueError(f'adaln: norm must be "layer" or "rms", not {norm!r}')
    centered, stepwise = norm == "layer", rounding != "last" and _stepwise(rounding)
    return _gate_residual_ada_norm(residual, branch, gate, scale, shift, weight, bias, eps, centered, stepwise)


def _stepwise(rounding: str) -> bool:
    if rounding not in ("last", "each"):
        raise ValueError(f'adaln: rounding must be "last" or "each", not {rounding!r}')
    return rounding == "each"


def _check_x(x: torch.Tensor, name: str) -> None:
    types = (torch.float32, torch.float16, torch.bfloat16)
    torch._check(x.dtype in types, lambda: f"adaln: {name} must be float32, float16 or bfloat16")
    torch._check(x.dim() > 0, lambda: f"adaln: {name} must have at least one dimension")


def _check_like(tensor: torch.Tensor, name: str, x: torch.Tensor, x_name: str) -> None:
    torch._check(tensor.device == x.device, lambda: f"adaln: {name} must be on the device of {x_name}")
    torch._check(tensor.dtype == x.dtype, lambda: f"adaln: {name} must have the dtype of {x_name}")
    torch._check(
        tensor.shape == x.shape,
        lambda: f"adaln: {name} must have shape {list(x.shape)}, not {list(tensor.shape)}",
    )


def _check_dtype(tensor: torch.Tensor, name: str, x: torch.Tensor, x_name: str) -> None:
    torch._check(
        tensor.dtype in (x.dtype, torch.float32),
        lambda: f"adaln: {name} must have the dtype of {x_name}, or float32",
    )


def _check_parameter(parameter: Optional[torch.Tensor], name: str, x: torch.Tensor, x_name: str) -> None:
    if parameter is None:
        return
    torch._check(parameter.device == x.device, lambda: f"adaln: {name} must be on the device of {x_name}")
    torch._check(
        parameter.dim() == 1 and parameter.shape[0] == x.shape[-1],
        lambda: f"adaln: {name} must have shape {[x.shape[-1]]}, not {list(parameter.shape)}",
    )
    _check_dtype(parameter, name, x, x_name)


def _leading(modulation: torch.Tensor) -> int:
    """How many of the first dimensions of `x` a modulation has; it is the same along the others."""
    count = modulation.dim() - 1
    while count > 0 and modulation.shape[count - 1] == 1:
        count -= 1
    return count


def _rows(modulation: torch.Tensor, x: torch.Tensor) -> tuple:
    """The dimensions of `x` that a modulation differs along."""
    return tuple(size for size in x.shape[: _leading(modulation)] if size != 1)


def _check_modulation(modulation: torch.Tensor, name: str, x: torch.Tensor, x_name: str) -> None:
    torch._check(modulation.device == x.device, lambda: f"adaln: {name} must be on the device of {x_name}")
    fits = 0 < modulation.dim() <= x.dim() and modulation.shape[-1] == x.shape[-1]
    fits = fits and modulation.shape[: _leading(modulation)] == x.shape[: _leading(modulation)]
    torch._check(
        fits,
        lambda: (
            f"adaln: {name} must have the shape of {x_name}, {list(x.shape)}, or 1 or nothing for dimensions"
            f" between its first ones and the last, not {list(modulation.shape)}"
        ),
    )
    _check_dtype(modulation, name, x, x_name)


def _check_modulations(x: torch.Tensor, x_name: str, **modulations: Optional[torch.Tensor]) -> None:
    given = {name: modulation for name, modulation in modulations.items() if modulation is not None}
    for name, modulation in given.items():
        _check_modulation(modulation, name, x, x_name)
    for name, first in zip(list(given)[1:], given):
        fits = _rows(given[name], x) == _rows(given[first], x)
        torch._check(fits, lambda text=f"adaln: {name} must have as many rows as {first}": text)


def _check_pair(scale: Optional[torch.Tensor], shift: Optional[torch.Tensor]) -> None:
    missing = "scale" if scale is None else "shift"
    torch._check((scale is None) == (shift is None), lambda: f"adaln: {missing} must be given, too")
    if scale is not None and shift is not None:
        torch._check(scale.dtype == shift.dtype, lambda: "adaln: shift must have the dtype of scale")


@torch.library.register_fake(add_op_namespace_prefix("ada_norm"))
def _ada_norm_fake(x, scale, shift, weight, bias, eps, centered, stepwise):
    _check_x(x, "x")
    _check_modulations(x, "x", scale=scale, shift=shift)
    _check_pair(scale, shift)
    _check_parameter(weight, "weight", x, "x")
    _check_parameter(bias, "bias", x, "x")
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("gate_residual"))
def _gate_residual_fake(residual, branch, gate, stepwise):
    _check_x(residual, "residual")
    _check_like(branch, "branch", residual, "residual")
    _check_modulations(residual, "residual", gate=gate)
    return residual.new_empty(residual.shape)


@torch.library.register_fake(add_op_namespace_prefix("gate_residual_ada_norm"))
def _gate_residual_ada_norm_fake(residual, branch, gate, scale, shift, weight, bias, eps, centered, stepwise):
    _check_x(residual, "residual")
    _check_like(branch, "branch", residual, "residual")
    _check_modulations(residual, "residual", scale=scale, shift=shift)
    _check_pair(scale, shift)
    _check_modulations(residual, "residual", scale=scale, gate=gate)
    _check_parameter(weight, "weight", residual, "residual")
    _check_parameter(bias, "bias", residual, "residual")
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _gradient(tensor, wanted, x):
    return (x if tensor is None else tensor).new_empty(tensor.shape if wanted and tensor is not None else 0)


@torch.library.register_fake(add_op_namespace_prefix("ada_norm_backward"))
def _ada_norm_backward_fake(
    grad,
    x,
    scale,
    weight,
    bias,
    grad_sum,
    branch,
    gate,
    eps,
    centered,
    modulation_grad,
    parameter_grad,
    gate_grad,
):
    one_of_both = scale if scale is not None else gate
    own = _has_own_rows(one_of_both, x)
    return (
        x.new_empty(x.shape),
        _gradient(scale, modulation_grad, x),
        _gradient(scale, modulation_grad and not own, x),
        _gradient(weight, parameter_grad, x),
        _gradient(bias, parameter_grad, x),
        _gradient(branch, True, x),
        _gradient(gate, gate_grad, x),
    )


@torch.library.register_fake(add_op_namespace_prefix("gate_residual_backward"))
def _gate_residual_backward_fake(grad, branch, gate, gate_grad):
    return branch.new_empty(branch.shape), _gradient(gate, gate_grad, branch)


def _has_own_rows(modulation, x):
    """Whether every row of `x` has its own row of a modulation."""
    leading = 0 if modulation is None else _leading(modulation)
    return all(size == 1 for size in x.shape[leading:-1])


def _norm_gradients(ctx, grad, x, scale, weight, bias, grad_sum, branch, gate, wanted):
    """The gradients for residual or x, branch, gate, scale, shift, weight and bias."""
    of_gate, of_scale, of_shift, of_weight, of_bias = wanted
    gradients = _ada_norm_backward(
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
    # `reshape` takes as long as a launch, also where there is nothing to do.
    if of_shift and (grad_shift is None or grad_shift.shape != ctx.shift_shape):
        grad_shift = (grad.to(scale.dtype) if _has_own_rows(scale, x) else grad_shift).reshape(ctx.shift_shape)
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
        return _raw_ada_norm(x, scale, shift, weight, bias, eps, centered, stepwise)

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
        return _raw_gate_residual(residual, branch, gate, stepwise)

    @staticmethod
    def backward(ctx, grad):
        _, of_branch, of_gate, _ = ctx.needs_input_grad
        if not of_branch and not of_gate:
            return grad, None, None, None
        branch, gate = ctx.saved_tensors
        grad_branch, grad_gate = _gate_residual_backward(grad, branch, gate, of_gate)
        return grad, grad_branch, grad_gate if of_gate else None, None


class _GateResidualAdaNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, branch, gate, scale, shift, weight, bias, eps, centered, stepwise):
        arguments = (residual, branch, gate, scale, shift, weight, bias, eps, centered, stepwise)
        total, normed = _raw_gate_residual_ada_norm(*arguments)
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
            grad_branch, grad_gate = _gate_residual_backward(grad_sum, branch, gate, wanted[0])
            return grad_sum, grad_branch, grad_gate if wanted[0] else None, *[None] * 7
        gradients = _norm_gradients(ctx, grad, total, scale, weight, bias, grad_sum, branch, gate, wanted)
        return (*gradients, None, None, None)


_raw_ada_norm = differentiable("ada_norm")
_raw_gate_residual = differentiable("gate_residual")
_raw_gate_residual_ada_norm = differentiable("gate_residual_ada_norm")
_ada_norm = differentiable("ada_norm", _AdaNorm, 5)
_gate_residual = differentiable("gate_residual", _GateResidual, 3)
_gate_residual_ada_norm = differentiable("gate_residual_ada_norm", _GateResidualAdaNorm, 7)
_SECOND_TIME = "adaln: its gradient cannot be differentiated a second time"
_ada_norm_backward = differentiable_once("ada_norm_backward", _SECOND_TIME)
_gate_residual_backward = differentiable_once("gate_residual_backward", _SECOND_TIME)
