"""References, tensors and assertions that the tests of adaln share."""

from pathlib import Path

import torch
from testing import DEVICE, Op, load, random

PROJECT = Path(__file__).resolve().parents[1]
EPS = 1e-6
# One element, less and more than a vector, odd, not a multiple of a vector, several rows per warp, one per warp and per
# block, with one and more vectors per thread, and rows longer than the registers hold.
HIDDEN = [1, 3, 8, 17, 64, 100, 1000, 5001, 20001]
if DEVICE == "cuda":  # more rows to a warp, a warp or block to a row, vectors to a thread
    HIDDEN += [72, 248, 512, 1152, 2048, 3072, 5120, 7168, 9000]
LONG = 120001  # more 16-bit elements than shared memory holds
MODULATIONS = ["[B, 1, C]", "[B, C]", "[C]", "[B, S, C]"]


kernel = load(PROJECT)
ops = kernel._ops.ops


def modulations(kind, batch, length, hidden, dtype, count=2):
    """Return strided slices of one tensor, of the given shape, as in models."""
    if kind == "[C]":
        return list(random(count, hidden, dtype=dtype).unbind(0))
    if kind == "[B, C]":
        return list(random(batch, count, hidden, dtype=dtype).unbind(1))
    return list(random(batch, length if kind == "[B, S, C]" else 1, count, hidden, dtype=dtype).unbind(2))


def spread(modulation, x):
    """Return the modulation in a shape that broadcasts with `x`."""
    if modulation is None or modulation.dim() in (1, x.dim()):
        return modulation
    return modulation.reshape(*modulation.shape[:-1], *[1] * (x.dim() - modulation.dim()), modulation.shape[-1])


def formula(x, scale, shift, weight=None, bias=None, eps=EPS, layer=True):
    """Return the modulated norm in the precision of `x`."""
    centered = x - x.mean(-1, keepdim=True) if layer else x
    normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    normed = normed if bias is None else normed + bias
    return normed if scale is None else normed * (1 + spread(scale, x)) + spread(shift, x)


def precisely(function, dtype):
    """Return the function with its arguments converted to another precision."""

    def convert(argument):
        return argument.to(dtype) if isinstance(argument, torch.Tensor) else argument

    return lambda *arguments, **named: function(*map(convert, arguments), **{k: convert(v) for k, v in named.items()})


exact = precisely(formula, torch.float64)


def eager(x, *arguments, **named):
    """Return the formula in float32, rounded once."""
    return precisely(formula, torch.float32)(x, *arguments, **named).to(x.dtype)


def gated(residual, branch, gate):
    return residual + (branch if gate is None else branch * spread(gate, residual))


exact_gated = precisely(gated, torch.float64)


def eager_gated(residual, branch, gate):
    return precisely(gated, torch.float32)(residual, branch, gate).to(residual.dtype)


def ada_norm(x, scale, shift, weight=None, bias=None, eps=EPS, layer=True):
    if layer:
        return kernel.ada_layer_norm(x, scale, shift, weight, bias, eps)
    return kernel.ada_rms_norm(x, scale, shift, weight, eps)


def leaves(*tensors):
    return [t.detach().requires_grad_() for t in tensors]


def fused(norm_function, gate_function, norm):
    def function(residual, branch, gate, scale, shift, weight=None, bias=None):
        total = gate_function(residual, branch, gate)
        return total, norm_function(total, scale, shift, weight, bias, EPS, norm == "layer")

    return function


def exact_fused(residual, branch, gate, scale, shift, weight, bias):
    total = gated(residual, branch, gate)
    return total, formula(total, scale, shift, weight, bias)


def inputs_of(kind, *names):
    """Return a function of a batch size and a dtype that returns the tensors of these names."""

    def inputs(batch, dtype):
        given = {name: random(batch, 3, 24, dtype=dtype) for name in ("x", "branch")}
        given.update(zip(("scale", "shift", "gate"), modulations(kind, batch, 3, 24, dtype, 3)))
        given.update(weight=random(24, dtype=torch.float32), bias=random(24, dtype=torch.float32))
        return [given[name] for name in names]

    return inputs


EMPTY = [2, 3, 24]  # batch, tokens and elements
OPS = {}
for kind in MODULATIONS:
    norm, gate = inputs_of(kind, "x", "scale", "shift", "weight", "bias"), inputs_of(kind, "x", "branch", "gate")
    fused_inputs = inputs_of(kind, "x", "branch", "gate", "scale", "shift", "weight", "bias")
    OPS[f"ada_layer_norm {kind}"] = Op(kernel.ada_layer_norm, formula, norm)
    OPS[f"gate_residual {kind}"] = Op(kernel.gate_residual, gated, gate)
    OPS[f"gate_residual_ada_norm {kind}"] = Op(kernel.gate_residual_ada_norm, exact_fused, fused_inputs)
OPS["ada_rms_norm"] = Op(
    kernel.ada_rms_norm,
    lambda *tensors: formula(*tensors, None, EPS, False),
    inputs_of("[B, C]", "x", "scale", "shift", "weight"),
)
OPS["add_ada_norm"] = Op(
    kernel.add_ada_norm,
    lambda x, branch, *others: exact_fused(x, branch, None, *others),
    inputs_of("[B, C]", "x", "branch", "scale", "shift", "weight", "bias"),
)
# Compiled together: modulations of one shape for a sequence, and those of each token.
GRAPHS = [{name: op for name, op in OPS.items() if not name.endswith(("[B, C]", "[C]"))}]
