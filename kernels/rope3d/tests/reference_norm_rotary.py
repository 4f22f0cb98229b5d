"""The reference of norm_rotary, and assertions, for its tests."""

import itertools

import torch
from reference_rope3d import beside, joined, kernel, of_elements, rotated
from testing import DEVICE, Op, random

EPS = 1e-6
# Heads of q and of k, elements of a head. Of one vector, of a whole warp and of more, odd multiples of a pair; equal
# and fewer heads of k.
HEADS = [(3, 3, 64), (4, 2, 128), (5, 1, 80), (2, 2, 10), (1, 1, 130), (2, 1, 512), (3, 2, 256), (1, 1, 2)]
FORMS = list(itertools.product(("head", "token"), (False, True)))  # norm, half


def angles(*shape):
    return torch.rand(*shape, dtype=torch.float64) * 7


def tables(turns, dtype=torch.float32):
    """Return cosines and sines of `turns` [..., pairs] on the device."""
    return turns.cos().to(DEVICE, dtype), turns.sin().to(DEVICE, dtype)


def normed(x, weight, norm="head", offset=0.0, rounding="last", dtype=torch.float64):
    """Normalize x [B, S, H, D] in `dtype`; round to the dtype of x unless it is float64."""
    target = x.dtype if dtype != torch.float64 else torch.float64
    wide = x.to(dtype)
    dims = (-1,) if norm == "head" else (-2, -1)
    result = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + EPS)
    if weight is not None:
        if rounding == "before_weight":
            result = result.to(target).to(dtype)
        factor = weight.to(dtype) + offset
        result = result * (factor if norm == "head" else factor.view(x.shape[-2:]))
    return result.to(target)


def reference(x, weight, turns, half=False, dtype=torch.float64, prefix=0, **options):
    """Normalize and rotate x [B, S, H, D]; `turns` are the `angles` of the tokens after the prefix."""
    result = normed(x, weight, dtype=dtype, **options)
    return torch.cat([result[:, :prefix], rotated(result[:, prefix:], turns, half, dtype)], 1)


def assert_as_good(actual, exact, eager, rounded=None):
    """Assert that the error of `actual` is at most 1.1 times that of float32 arithmetic with the same roundings."""
    scale = torch.finfo(rounded or actual.dtype).eps
    assert actual.dtype == eager.dtype and actual.shape == exact.shape
    bound = 4 * scale * (exact.abs().amax().item() if exact.numel() else 0)
    torch.testing.assert_close(actual.double(), exact, rtol=2 * scale, atol=bound)
    if exact.numel() >= 1000:
        own, other = (actual.double() - exact).norm(), (eager.double() - exact).norm()
        assert own <= 1.1 * other + 1e-6 * exact.norm()


def gradients(inputs, weights, grads, dtype, turns, half, **options):
    """Return the gradients of q, k and their weights, computed in `dtype` without roundings."""
    given = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (*inputs, *weights)]
    outs = [reference(x, w, turns, half, dtype, **options) for x, w in zip(given[:2], given[2:])]
    return torch.autograd.grad(outs, [t for t in given if t is not None], [g.to(dtype) for g in grads])


def assert_accurate_gradients(actual, inputs, weights, grads, turns, half=False, rounding="last", **options):
    """Assert that errors are at most 1.1 times those of float32 arithmetic without roundings."""
    exact = gradients(inputs, weights, grads, torch.float64, turns, half, **options)
    single = gradients(inputs, weights, grads, torch.float32, turns, half, **options)
    for own, other, wanted in zip(actual, single, exact):
        scale = torch.finfo(own.dtype).eps
        error = (own.double() - wanted).norm()
        assert error <= 1.1 * (other.to(own.dtype).double() - wanted).norm() + 2e-6 * wanted.norm()
        # In short rows, terms that are a multiple of the gradient cancel.
        torch.testing.assert_close(own.double(), wanted, rtol=2 * scale, atol=8 * scale * wanted.abs().max().item())


def pairs_of(half):
    return "half" if half else "interleaved"


def assert_accurate(inputs, weights, turns, half=False, tables=None, rotary_dim=None, backward=True, **options):
    """Compare results and gradients of a call with the reference, and return the results.

    `tables`: those of `turns` as the call gets them, by default with one entry for each element.
    """
    cos, sin = tables or (joined(t, half) for t in turns)
    given = [None if t is None else t.detach().requires_grad_(backward) for t in (*inputs, *weights)]
    outs = kernel.norm_rotary(*given, cos, sin, pairs=pairs_of(half), rotary_dim=rotary_dim, **options)
    for out, x, weight in zip(outs, inputs, weights):
        exact = reference(x, weight, turns, half, **options)
        assert_as_good(out.detach(), exact, reference(x, weight, turns, half, torch.float32, **options))
    if backward:
        leaves, grads = [t for t in given if t is not None], [random(*out.shape, dtype=out.dtype) for out in outs]
        actual = torch.autograd.grad(outs, leaves, grads)
        assert all(own.shape == leaf.shape and own.dtype == leaf.dtype for own, leaf in zip(actual, leaves))
        assert_accurate_gradients(actual, inputs, weights, grads, turns, half, **options)
    return outs


def heads_of(q_heads, k_heads, dim, dtype, batch=2, tokens=7, weight_dtype=None, norm="head"):
    """Return q and k, and their weights."""
    inputs = [random(batch, tokens, heads, dim, dtype=dtype) for heads in (q_heads, k_heads)]
    weights = [
        random(dim if norm == "head" else heads * dim, dtype=weight_dtype or dtype) for heads in (q_heads, k_heads)
    ]
    return inputs, weights


def norm_op(norm):
    """Return the op with a prefix, an offset, and tables with entries of elements."""
    half = norm == "token"
    turns = of_elements(5, 8)
    cos, sin = (joined(t, half) for t in turns)
    options = {"norm": norm, "offset": 1.0, "rounding": "before_weight"}

    def exact(q, k, q_weight, k_weight):
        pairs = (q, q_weight), (k, k_weight)
        return tuple(reference(x, weight, turns, half, prefix=2, **options) for x, weight in pairs)

    def function(*given):
        return kernel.norm_rotary(*given, *beside((cos, sin), *given), pairs=pairs_of(half), prefix=2, **options)

    return Op(
        function, exact, lambda *given: [t for pair in heads_of(3, 1, 16, given[1], given[0], norm=norm) for t in pair]
    )


OPS = {f"norm_rotary over each {norm}": norm_op(norm) for norm in ("head", "token")}
