"""References, tensors and assertions that the tests of rmsnorm share."""

from functools import partial
from pathlib import Path

import torch
from testing import Op, assert_accurate, load, random

PROJECT = Path(__file__).resolve().parents[1]
EPS = 1e-6
# One element, less and more than a vector, odd, not a multiple of a vector, several rows per warp and per block, and
# rows longer than the registers hold.
HIDDEN = [1, 3, 8, 17, 64, 100, 128, 768, 1000, 2048, 4096, 5000, 5001, 16384, 20001, 70000]


kernel = load(PROJECT)
ops = kernel._ops.ops


def exact(x, weight=None, eps=EPS, offset=0.0, rounding="last"):
    """Return the RMSNorm in float64."""
    x = x.double()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (offset + weight.double())


def eager(x, weight=None, eps=EPS, offset=0.0, rounding="last"):
    """Return the models' formula: in float32, rounded once as in Gemma, or before the weight as in Llama."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if rounding == "last":
        return (normed * (offset + weight.float())).to(x.dtype)
    return ((offset + weight.float()) * normed.to(x.dtype)).to(torch.promote_types(x.dtype, weight.dtype))


def gradients_of_rows(grad, x, weight, grad_sum, offset=0.0):
    return ops.rms_norm_backward(grad, x, weight, grad_sum, weight is not None, EPS, offset)


def assert_accurate_sum(x, residual, weight, grads, **options):
    """Compare `add_rms_norm` and its gradients with the formulas."""

    def fused(norm, x, residual, weight):
        total = x + residual
        if total.dtype == torch.float64:
            # The forward pass rounds the sum; its gradient is that of the rounded value.
            total = total + (total.to(grads[0].dtype).double() - total).detach()
        return norm(total, weight, EPS, **options), total

    functions = partial(kernel.add_rms_norm, eps=EPS, **options), partial(fused, eager), partial(fused, exact)
    assert_accurate(*functions, [x, residual, weight], grads)
    assert torch.equal(kernel.add_rms_norm(x, residual, weight, EPS, **options)[1], x + residual)


def inputs_of(count, weight_dtype=None):
    """Return a function of a batch size and a dtype that returns `count` tensors and a weight."""

    def inputs(batch, dtype):
        return [*(random(batch, 3, 24, dtype=dtype) for _ in range(count)), random(24, dtype=weight_dtype or dtype)]

    return inputs


EMPTY = [2, 3, 24]  # batch, tokens and elements
OPS = {"rms_norm without weight": Op(kernel.rms_norm, exact, lambda *given: inputs_of(1)(*given)[:1])}
for options in ({}, {"offset": 1.0}, {"rounding": "before_weight"}):
    norm, formula, added = (partial(f, **options) for f in (kernel.rms_norm, exact, kernel.add_rms_norm))
    name = str(options or "")
    OPS[f"rms_norm {name}"] = Op(norm, formula, inputs_of(1))
    OPS[f"rms_norm {name}, float32 weight"] = Op(norm, formula, inputs_of(1, torch.float32))
    OPS[f"add_rms_norm {name}"] = Op(added, lambda x, r, w, f=formula: (f(x + r, w), x + r), inputs_of(2))
