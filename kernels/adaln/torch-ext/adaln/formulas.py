"""The ops in Torch operations, for the derivatives that have no kernel, and their fakes, for torch.compile."""

import torch

from ._ops import add_op_namespace_prefix
from .derivatives import transform_with
from .devices import refuse_cpu


def ada_norm(x, scale, shift, weight, bias, eps, centered, stepwise):
    # Stepwise, models round each result to the dtype of x.
    rounded = x.dtype if stepwise else torch.float32
    normed = x.float()
    if centered:
        normed = normed - normed.mean(-1, keepdim=True)
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    if scale is None:
        return normed.to(x.dtype)
    factor = (1 + _spread(scale, x)).to(rounded).float()
    product = (normed.to(rounded).float() * factor).to(rounded).float()
    return (product + _spread(shift, x)).to(x.dtype)


def gate_residual(residual, branch, gate, stepwise):
    product = branch.float() * _spread(gate, residual)
    if stepwise:
        product = product.to(residual.dtype).float()
    return (residual.float() + product).to(residual.dtype)


def gate_residual_ada_norm(residual, branch, gate, scale, shift, eps, centered, stepwise, weight=None, bias=None):
    total = residual + branch if gate is None else gate_residual(residual, branch, gate, stepwise)
    return total, ada_norm(total, scale, shift, weight, bias, eps, centered, stepwise)


def _spread(modulation, x):
    """Return a modulation in float32, in a shape that broadcasts with `x`."""
    modulation = modulation.float()
    missing = x.dim() - modulation.dim()
    return modulation[(..., *[None] * missing, slice(None))] if modulation.dim() > 1 else modulation


transform_with("ada_norm", ada_norm)
transform_with("gate_residual", gate_residual)
transform_with("gate_residual_ada_norm", gate_residual_ada_norm)


# --- fakes: shapes and dtypes of results; the binding checks the arguments ------------------------------------------


def _like(x, *arguments, **options):
    return x.new_empty(x.shape)


torch.library.register_fake(add_op_namespace_prefix("ada_norm"))(_like)
torch.library.register_fake(add_op_namespace_prefix("gate_residual"))(_like)


@torch.library.register_fake(add_op_namespace_prefix("gate_residual_ada_norm"))
def _gate_residual_ada_norm_fake(residual, *arguments, **options):
    return _like(residual), _like(residual)


def _has_own_rows(modulation, x):
    """Return whether every row of `x` has its own row of a modulation."""
    leading = 0 if modulation is None else modulation.dim() - 1
    while leading > 0 and modulation.shape[leading - 1] == 1:
        leading -= 1
    return all(size == 1 for size in x.shape[leading:-1])


def _gradient(tensor, wanted):
    return tensor.new_empty(tensor.shape) if wanted and tensor is not None else None


@torch.library.register_fake(add_op_namespace_prefix("ada_norm_backward"))
def _ada_norm_backward_fake(grad, x, scale, weight, bias, eps, centered, of_modulations, of_parameters, *gated):
    _, branch, gate, of_gate = (*gated, *[None] * 4)[:4]  # grad_sum and these have default values
    own = _has_own_rows(gate if scale is None else scale, x)
    return (
        _gradient(x, grad is not None),
        _gradient(scale, of_modulations),
        _gradient(scale, of_modulations and not own),
        _gradient(weight, of_parameters),
        _gradient(bias, of_parameters),
        _gradient(branch, True),
        _gradient(gate, of_gate),
    )


@torch.library.register_fake(add_op_namespace_prefix("gate_residual_backward"))
def _gate_residual_backward_fake(grad, branch, gate, gate_grad):
    return branch.new_empty(branch.shape), _gradient(gate, gate_grad)


refuse_cpu("ada_norm", "gate_residual", "gate_residual_ada_norm", "ada_norm_backward", "gate_residual_backward")
