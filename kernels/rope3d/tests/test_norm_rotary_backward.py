"""Compare gradients of norm_rotary with those of float64."""

import os

import pytest
import torch
from reference_norm_rotary import FORMS, HEADS, angles, heads_of, reference, tables
from reference_rope3d import joined, kernel, of_elements
from testing import DEVICE, DTYPES, random


def gradients(inputs, weights, grads, dtype, turns, half, **options):
    """Return the gradients of q, k and their weights, computed in `dtype` without roundings."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (*inputs, *weights)]
    outs = [reference(x, w, turns, half, dtype, **options) for x, w in zip(leaves[:2], leaves[2:])]
    return torch.autograd.grad(outs, leaves, [g.to(dtype) for g in grads])


def assert_gradients(actual, inputs, weights, grads, turns, half=False, **options):
    """Assert that errors are at most 1.1 times those of float32 arithmetic, rounded once."""
    exact = gradients(inputs, weights, grads, torch.float64, turns, half, **options)
    single = gradients(inputs, weights, grads, torch.float32, turns, half, **options)
    for own, other, wanted in zip(actual, single, exact):
        scale = torch.finfo(own.dtype).eps
        error = (own.double() - wanted).norm()
        assert error <= 1.1 * (other.to(own.dtype).double() - wanted).norm() + 2e-6 * wanted.norm()
        # In short rows, terms that are a multiple of the gradient cancel.
        torch.testing.assert_close(own.double(), wanted, rtol=2 * scale, atol=8 * scale * wanted.abs().max().item())


def compare(
    q_heads, k_heads, dim, dtype, norm, half, batch=2, tokens=7, prefix=0, weight_dtype=None, each=True, **options
):
    """`each`: the tables have one entry for each element, else for each pair."""
    inputs, weights = heads_of(q_heads, k_heads, dim, dtype, batch, tokens, weight_dtype, norm)
    shape = tokens - prefix, dim // 2
    turns = of_elements(*shape) if each else tables(angles(*shape))
    cos, sin = (joined(t, half) for t in turns) if each else turns
    leaves = [t.requires_grad_() for t in (*inputs, *weights)]
    outs = kernel.norm_rotary(
        *leaves, cos, sin, norm=norm, pairs="half" if half else "interleaved", prefix=prefix, **options
    )
    grads = [random(*out.shape, dtype=dtype) for out in outs]
    actual = torch.autograd.grad(outs, leaves, grads)
    for own, leaf in zip(actual, leaves):
        assert own.shape == leaf.shape and own.dtype == leaf.dtype
    options.pop("rounding", None)
    assert_gradients(actual, inputs, weights, grads, turns, half, norm=norm, prefix=prefix, **options)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("norm", "half"), FORMS)
@pytest.mark.parametrize(("q_heads", "k_heads", "dim"), HEADS)
def test_backward(q_heads, k_heads, dim, norm, half, dtype):
    compare(q_heads, k_heads, dim, dtype, norm, half)


@pytest.mark.parametrize(("norm", "half"), FORMS)
@pytest.mark.parametrize(("heads", "dim"), [(12, 128), (1, 2048), (40, 128), (1, 6200), (64, 128), (3, 3000)])
def test_long_rows(heads, dim, norm, half):
    for each in (False, True):
        compare(heads, heads, dim, torch.bfloat16, norm, half, 1, 3, each=each)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["last", "before_weight"])
@pytest.mark.parametrize("norm", ["head", "token"])
def test_options(norm, rounding, dtype):
    """A prefix, an offset and float32 weights; roundings change no gradient."""
    compare(4, 2, 64, dtype, norm, False, prefix=3, offset=1.0, weight_dtype=torch.float32, rounding=rounding)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("norm", "half"), FORMS if DEVICE == "cuda" else FORMS[:1])
def test_many_tokens(norm, half):
    """More tokens than the blocks of a GPU take at once."""
    compare(5, 3, 64, torch.bfloat16, norm, half, 3, 1100, each=False)


@pytest.mark.skipif(
    DEVICE == "cuda" or "KERNEL_BUILDER_EMULATOR" in os.environ, reason="code for GPUs adds in another order"
)
@pytest.mark.parametrize("tokens", [128, 640])
@pytest.mark.parametrize(("norm", "half"), FORMS)
def test_sums_over_rows(norm, half, tokens):
    """Sums over tokens and heads are as precise as PyTorch's."""
    inputs, weights = heads_of(24, 32, 128, torch.float32, 1, tokens, norm=norm)
    turns = tables(angles(tokens, 64))
    leaves = [t.requires_grad_() for t in (*inputs, *weights)]
    outs = kernel.norm_rotary(*leaves, *turns, norm=norm, pairs="half" if half else "interleaved")
    grads = [random(*out.shape, dtype=torch.float32) for out in outs]
    actual = torch.autograd.grad(outs, leaves, grads)[2:]
    exact, single = (
        gradients(inputs, weights, grads, dtype, turns, half, norm=norm)[2:] for dtype in (torch.float64, torch.float32)
    )
    for own, other, wanted in zip(actual, single, exact):
        assert (own.double() - wanted).norm() <= 1.1 * (other.double() - wanted).norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("norm", "half"), FORMS)
@pytest.mark.parametrize("dim", [10, 64])
def test_layouts(dim, norm, half, dtype):
    """Strided inputs and strided gradients, in every layout."""
    (q, k), weights = heads_of(5, 2, dim, dtype, tokens=11, norm=norm)
    cos, sin = tables(angles(2, 11, dim // 2))
    grads = random(2, 11, 5, dim, dtype=dtype), random(2, 11, 2, dim, dtype=dtype)
    joined = torch.cat([q, k, k], 2)
    for layout, given, to in (
        ("bshd", joined.split([5, 2, 2], 2)[:2], lambda t: t),
        ("bhsd", [t.transpose(1, 2) for t in joined.split([5, 2, 2], 2)[:2]], lambda t: t.transpose(1, 2)),
        ("bsc", joined.flatten(2).split([5 * dim, 2 * dim, 2 * dim], 2)[:2], lambda t: t.flatten(2)),
    ):
        leaves = [t.detach().requires_grad_() for t in (*given, *weights)]
        form = {"layout": layout, "head_dim": dim if layout == "bsc" else None, "norm": norm}
        outs = kernel.norm_rotary(*leaves, cos, sin, pairs="half" if half else "interleaved", **form)
        actual = torch.autograd.grad(outs, leaves, [to(g) for g in grads])
        back = [g.transpose(1, 2) if layout == "bhsd" else g.view(x.shape) for g, x in zip(actual, (q, k))]
        assert_gradients([*back, *actual[2:]], (q, k), weights, grads, (cos, sin), half, norm=norm)


def test_expanded_gradient():
    """A gradient whose elements share memory, as a sum gives it."""
    (q, k), _ = heads_of(4, 2, 64, torch.float32)
    cos, sin = tables(angles(7, 32))
    out, _ = kernel.norm_rotary(q.requires_grad_(), k, None, None, cos, sin)
    ones = torch.ones((), device=q.device).expand(q.shape)
    expanded, contiguous = (torch.autograd.grad(out, q, g, retain_graph=True) for g in (ones, ones.contiguous()))
    assert torch.equal(*expanded, *contiguous)
