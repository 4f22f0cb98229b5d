"""The ops in Torch operations, for the derivatives that have no kernel."""

import torch

from .derivatives import transform_with


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
    return _gated(residual, branch, gate, stepwise)


def gate_residual_ada_norm(residual, branch, gate, scale, shift, eps, centered, stepwise, weight=None, bias=None):
    total = residual + branch if gate is None else _gated(residual, branch, gate, stepwise)
    return total, ada_norm(total, scale, shift, weight, bias, eps, centered, stepwise)


def _gated(residual, branch, gate, stepwise):
    product = branch.float() * _spread(gate, residual)
    if stepwise:
        product = product.to(residual.dtype).float()
    return (residual.float() + product).to(residual.dtype)


def _spread(modulation, x):
    """Return a modulation in float32, in a shape that broadcasts with `x`."""
    modulation = modulation.float()
    missing = x.dim() - modulation.dim()
    return modulation[(..., *[None] * missing, slice(None))] if modulation.dim() > 1 else modulation


transform_with("ada_norm", ada_norm)
transform_with("gate_residual", gate_residual)
transform_with("gate_residual_ada_norm", gate_residual_ada_norm)
