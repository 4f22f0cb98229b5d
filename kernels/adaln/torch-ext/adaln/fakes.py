"""The fakes of the ops: the shapes and dtypes of their results, and the errors of the binding, for torch.compile."""

from typing import Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix
from .devices import refuse_cpu


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"adaln: {message}")


def _check_x(x: Tensor, name: str) -> None:
    _require(x.dtype in (torch.float32, torch.float16, torch.bfloat16), f"{name} must be float32, float16 or bfloat16")
    _require(x.dim() > 0, f"{name} must have at least one dimension")


def _check_like(tensor: Tensor, name: str, x: Tensor, x_name: str) -> None:
    _require(tensor.device == x.device, f"{name} must be on the device of {x_name}")
    _require(tensor.dtype == x.dtype, f"{name} must have the dtype of {x_name}")
    _require(
        tensor.shape == x.shape,
        f"{name} must have shape {list(x.shape)}, not {list(tensor.shape)}",
    )


def _check_dtype(tensor: Tensor, name: str, x: Tensor, x_name: str) -> None:
    _require(
        tensor.dtype in (x.dtype, torch.float32),
        f"{name} must have the dtype of {x_name}, or float32",
    )


def _check_parameter(parameter: Optional[Tensor], name: str, x: Tensor, x_name: str) -> None:
    if parameter is None:
        return
    _require(parameter.device == x.device, f"{name} must be on the device of {x_name}")
    _require(
        parameter.dim() == 1 and parameter.shape[0] == x.shape[-1],
        f"{name} must have shape {[x.shape[-1]]}, not {list(parameter.shape)}",
    )
    _check_dtype(parameter, name, x, x_name)


def _leading(modulation: Tensor) -> int:
    """Return the number of leading dimensions along which a modulation may differ."""
    count = modulation.dim() - 1
    while count > 0 and modulation.shape[count - 1] == 1:
        count -= 1
    return count


def _has_own_rows(modulation, x):
    """Return whether every row of `x` has its own row of a modulation."""
    leading = 0 if modulation is None else _leading(modulation)
    return all(size == 1 for size in x.shape[leading:-1])


def _rows(modulation: Tensor, x: Tensor) -> tuple:
    """Return the sizes of the dimensions of `x` along which a modulation differs."""
    return tuple(size for size in x.shape[: _leading(modulation)] if size != 1)


def _check_modulation(modulation: Tensor, name: str, x: Tensor, x_name: str) -> None:
    _require(modulation.device == x.device, f"{name} must be on the device of {x_name}")
    fits = 0 < modulation.dim() <= x.dim() and modulation.shape[-1] == x.shape[-1]
    fits = fits and modulation.shape[: _leading(modulation)] == x.shape[: _leading(modulation)]
    _require(
        fits,
        f"{name} must have the shape of {x_name}, {list(x.shape)}, or 1 or nothing for dimensions"
        f" between its first ones and the last, not {list(modulation.shape)}",
    )
    _check_dtype(modulation, name, x, x_name)


def _check_modulations(x: Tensor, x_name: str, **modulations: Optional[Tensor]) -> None:
    given = {name: modulation for name, modulation in modulations.items() if modulation is not None}
    for name, modulation in given.items():
        _check_modulation(modulation, name, x, x_name)
    for name, first in zip(list(given)[1:], given):
        _require(_rows(given[name], x) == _rows(given[first], x), f"{name} must have as many rows as {first}")


def _check_pair(scale: Optional[Tensor], shift: Optional[Tensor]) -> None:
    missing = "scale" if scale is None else "shift"
    _require((scale is None) == (shift is None), f"{missing} must be given, too")
    if scale is not None and shift is not None:
        _require(scale.dtype == shift.dtype, "shift must have the dtype of scale")


def check_norm(
    x: Tensor, scale: Optional[Tensor], shift: Optional[Tensor], weight: Optional[Tensor], bias: Optional[Tensor]
) -> None:
    _check_x(x, "x")
    _check_modulations(x, "x", scale=scale, shift=shift)
    _check_pair(scale, shift)
    _check_parameter(weight, "weight", x, "x")
    _check_parameter(bias, "bias", x, "x")


@torch.library.register_fake(add_op_namespace_prefix("ada_norm"))
def _ada_norm_fake(x, scale, shift, weight, bias, eps, centered, stepwise):
    check_norm(x, scale, shift, weight, bias)
    return x.new_empty(x.shape)


def check_gate(residual: Tensor, branch: Tensor, gate: Tensor) -> None:
    _check_x(residual, "residual")
    _check_like(branch, "branch", residual, "residual")
    _check_modulations(residual, "residual", gate=gate)


@torch.library.register_fake(add_op_namespace_prefix("gate_residual"))
def _gate_residual_fake(residual, branch, gate, stepwise):
    check_gate(residual, branch, gate)
    return residual.new_empty(residual.shape)


def check_gate_and_norm(
    residual: Tensor,
    branch: Tensor,
    gate: Optional[Tensor],
    scale: Optional[Tensor],
    shift: Optional[Tensor],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
) -> None:
    _check_x(residual, "residual")
    _check_like(branch, "branch", residual, "residual")
    _check_modulations(residual, "residual", scale=scale, shift=shift)
    _check_pair(scale, shift)
    _check_modulations(residual, "residual", scale=scale, gate=gate)
    _check_parameter(weight, "weight", residual, "residual")
    _check_parameter(bias, "bias", residual, "residual")


@torch.library.register_fake(add_op_namespace_prefix("gate_residual_ada_norm"))
def _gate_residual_ada_norm_fake(residual, branch, gate, scale, shift, eps, centered, stepwise, weight=None, bias=None):
    check_gate_and_norm(residual, branch, gate, scale, shift, weight, bias)
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _gradient(tensor, wanted):
    return tensor.new_empty(tensor.shape) if wanted and tensor is not None else None


@torch.library.register_fake(add_op_namespace_prefix("ada_norm_backward"))
def _ada_norm_backward_fake(
    grad,
    x,
    scale,
    weight,
    bias,
    eps,
    centered,
    modulation_grad,
    parameter_grad,
    grad_sum=None,
    branch=None,
    gate=None,
    gate_grad=False,
):
    own = _has_own_rows(gate if scale is None else scale, x)
    return (
        x.new_empty(x.shape),
        _gradient(scale, modulation_grad),
        _gradient(scale, modulation_grad and not own),
        _gradient(weight, parameter_grad),
        _gradient(bias, parameter_grad),
        _gradient(branch, True),
        _gradient(gate, gate_grad),
    )


@torch.library.register_fake(add_op_namespace_prefix("gate_residual_backward"))
def _gate_residual_backward_fake(grad, branch, gate, gate_grad):
    return branch.new_empty(branch.shape), _gradient(gate, gate_grad)


refuse_cpu("ada_norm", "gate_residual", "gate_residual_ada_norm", "ada_norm_backward", "gate_residual_backward")
