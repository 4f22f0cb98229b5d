"""The fakes of the ops: the shapes and dtypes of their results, for torch.compile. The binding checks the arguments."""

import torch

from ._ops import add_op_namespace_prefix
from .devices import refuse_cpu


@torch.library.register_fake(add_op_namespace_prefix("ada_norm"))
def _ada_norm_fake(x, scale, shift, weight, bias, eps, centered, stepwise):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("gate_residual"))
def _gate_residual_fake(residual, branch, gate, stepwise):
    return residual.new_empty(residual.shape)


@torch.library.register_fake(add_op_namespace_prefix("gate_residual_ada_norm"))
def _gate_residual_ada_norm_fake(residual, branch, gate, scale, shift, eps, centered, stepwise, weight=None, bias=None):
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _has_own_rows(modulation, x):
    """Return whether every row of `x` has its own row of a modulation."""
    leading = 0 if modulation is None else modulation.dim() - 1
    while leading > 0 and modulation.shape[leading - 1] == 1:
        leading -= 1
    return all(size == 1 for size in x.shape[leading:-1])


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
