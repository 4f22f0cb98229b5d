"""Compare results and gradients of norm_rotary with float64."""

import os

import pytest
import torch
from reference_norm_rotary import (
    FORMS,
    HEADS,
    angles,
    assert_accurate,
    assert_accurate_gradients,
    gradients,
    heads_of,
    pairs_of,
    tables,
)
from reference_rope3d import kernel, layouts_of, of_elements
from testing import DEVICE, DTYPES, random


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("norm", "half"), FORMS)
@pytest.mark.parametrize(("q_heads", "k_heads", "dim"), HEADS)
def test_heads(q_heads, k_heads, dim, norm, half, dtype):
    inputs, weights = heads_of(q_heads, k_heads, dim, dtype, norm=norm)
    assert_accurate(inputs, weights, of_elements(7, dim // 2), half, norm=norm)


@pytest.mark.parametrize(("norm", "half"), FORMS)
@pytest.mark.parametrize(
    ("heads", "dim", "backward"),
    [(heads, 128, heads in (12, 40, 64)) for heads in (12, 16, 40, 64)]
    + [(1, dim, dim in (2048, 6200)) for dim in (1536, 2048, 5120, 6200, 8192, 12000, 20000)]
    + [(3, 3000, True)],
)
def test_long_rows(heads, dim, backward, norm, half):
    inputs, weights = heads_of(heads, heads, dim, torch.bfloat16, 1, 3, norm=norm)
    once = tables(angles(3, dim // 2))
    assert_accurate(inputs, weights, of_elements(3, dim // 2), half, norm=norm, backward=backward)
    assert_accurate(inputs, weights, once, half, once, norm=norm, backward=backward)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["last", "before_weight"])
@pytest.mark.parametrize("weight", ["own", "float32", "none"])
@pytest.mark.parametrize("norm", ["head", "token"])
def test_weights(norm, weight, rounding, dtype):
    weight_dtype = torch.float32 if weight == "float32" else dtype
    inputs, weights = heads_of(4, 2, 64, dtype, weight_dtype=weight_dtype, norm=norm)
    weights = [None, None] if weight == "none" else weights
    for offset, prefix in ((0.0, 0), (1.0, 3)):
        turns = tables(angles(7 - prefix, 32))
        options = {"norm": norm, "rounding": rounding, "offset": offset, "prefix": prefix}
        assert_accurate(inputs, weights, turns, tables=turns, **options)


def test_eps():
    q = random(1, 5, 2, 64, dtype=torch.float32) * 1e-3
    cos, sin = tables(angles(5, 32))
    small, large = (kernel.norm_rotary(q, None, None, None, cos, sin, eps=eps)[0] for eps in (1e-12, 1.0))
    torch.testing.assert_close(small.square().mean(-1), torch.ones_like(q[..., 0]))
    torch.testing.assert_close(large.norm(), q.norm(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(30,), (1, 30), (2, 30)])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 32, 40, 12])
def test_tables(rotary_dim, half, shape, table_dtype):
    """One entry for each pair, or for each element."""
    inputs, weights = heads_of(4, 2, 64, torch.bfloat16, tokens=30)
    entries = of_elements(*shape, (rotary_dim or 64) // 2, dtype=table_dtype)
    first = tuple(a for a, _ in entries)
    for turns, given in ((entries, None), (first, first)):
        assert_accurate(inputs, weights, turns, half, given, rotary_dim, backward=False)


@pytest.mark.parametrize("half", [False, True])
def test_tables_apart(half):
    """cos and sin with different strides, and entries that are neither one nor two apart."""
    inputs, weights = heads_of(4, 2, 64, torch.bfloat16, tokens=30)
    cos, sin = random(32, 30, dtype=torch.float32).t(), random(30, 64, dtype=torch.float32)[:, 1::2]
    for turns in ((cos, sin), (random(30, 96, dtype=torch.float32)[:, ::3],) * 2):
        assert_accurate(inputs, weights, turns, half, turns, backward=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [10, 64])
@pytest.mark.parametrize(("norm", "half"), FORMS)
@pytest.mark.parametrize("prefix", [0, 3])
def test_layouts(prefix, norm, half, dim, dtype):
    """Every layout and stride gives the results of the contiguous layout, and as accurate gradients."""
    (q, k), weights = heads_of(5, 2, dim, dtype, tokens=11, norm=norm)
    turns = tables(angles(2, 11 - prefix, dim // 2))
    options = {"prefix": prefix, "norm": norm}
    wanted = assert_accurate((q, k), weights, turns, half, turns, **options)
    grads = [random(*x.shape, dtype=dtype) for x in (q, k)]

    apart = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k))
    for name, (layout, *given) in {**layouts_of(q, k), "elements apart": ("bshd", *apart)}.items():
        form = {"layout": layout, "head_dim": dim if layout == "bsc" else None, "pairs": pairs_of(half)}

        def back(tensors, layout=layout):
            return [t.transpose(1, 2) if layout == "bhsd" else t.reshape(x.shape) for t, x in zip(tensors, (q, k))]

        leaves = [t.detach().requires_grad_() for t in (*given, *weights)]
        outs = kernel.norm_rotary(*leaves, *turns, **form, **options)
        assert all(out.is_contiguous() and out.shape == x.shape for out, x in zip(outs, given)), name
        # Sums are added in another order where rows are read element by element.
        torch.testing.assert_close(back(outs), list(wanted), msg=name)
        strided = [g.transpose(1, 2) if layout == "bhsd" else g.reshape(out.shape) for g, out in zip(grads, outs)]
        actual = torch.autograd.grad(outs, leaves, strided)
        assert_accurate_gradients([*back(actual), *actual[2:]], (q, k), weights, grads, turns, half, **options)


@pytest.mark.parametrize(("norm", "half"), FORMS)
def test_without_k(norm, half):
    (q, k), (weight, _) = heads_of(4, 4, 64, torch.float16, norm=norm)
    cos, sin = tables(angles(7, 32))
    both = kernel.norm_rotary(q, k, weight, weight, cos, sin, norm=norm, pairs=pairs_of(half))
    alone, none = kernel.norm_rotary(q, None, weight, None, cos, sin, norm=norm, pairs=pairs_of(half))
    assert none is None and torch.equal(alone, both[0])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("norm", "half"), FORMS)
def test_many_tokens(norm, half):
    """More sequences, tokens and heads than a block has, and tokens than a GPU's blocks take at once."""
    for shape in ((405,), (3, 405)):
        turns = tables(angles(*shape, 32))
        inputs, weights = heads_of(17, 5, 64, torch.bfloat16, 3, 405, norm=norm)
        assert_accurate(inputs, weights, turns, half, turns, norm=norm, backward=False)
    if DEVICE == "cuda" or (norm, half) == FORMS[0]:
        turns = tables(angles(1100, 32))
        inputs, weights = heads_of(5, 3, 64, torch.bfloat16, 3, 1100, norm=norm)
        assert_accurate(inputs, weights, turns, half, turns, norm=norm)


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
    outs = kernel.norm_rotary(*leaves, *turns, norm=norm, pairs=pairs_of(half))
    grads = [random(*out.shape, dtype=torch.float32) for out in outs]
    actual = torch.autograd.grad(outs, leaves, grads)[2:]
    exact, single = (
        gradients(inputs, weights, grads, dtype, turns, half, norm=norm)[2:] for dtype in (torch.float64, torch.float32)
    )
    for own, other, wanted in zip(actual, single, exact):
        assert (own.double() - wanted).norm() <= 1.1 * (other.double() - wanted).norm()


def test_expanded_gradient():
    """A gradient whose elements share memory, as a sum gives it."""
    (q, k), _ = heads_of(4, 2, 64, torch.float32)
    cos, sin = tables(angles(7, 32))
    out, _ = kernel.norm_rotary(q.requires_grad_(), k, None, None, cos, sin)
    ones = torch.ones((), device=q.device).expand(q.shape)
    expanded, contiguous = (torch.autograd.grad(out, q, g, retain_graph=True) for g in (ones, ones.contiguous()))
    assert torch.equal(*expanded, *contiguous)


@pytest.mark.parametrize("shape", [(0, 7, 2, 64), (2, 7, 0, 64), (2, 7, 2, 0), (2, 0, 2, 64)])
@pytest.mark.parametrize("norm", ["head", "token"])
def test_empty(norm, shape):
    q = random(*shape, dtype=torch.float16, requires_grad=True)
    k = random(2, 7, 2, 64, dtype=torch.float16) if shape[2] == 0 else random(*shape, dtype=torch.float16)
    elements = shape[-1] * (1 if norm == "head" else shape[2])
    weight = random(elements, dtype=torch.float16, requires_grad=True)
    cos, sin = tables(angles(shape[1], shape[3] // 2))
    out_q, out_k = kernel.norm_rotary(q, k, weight, None, cos, sin, norm=norm)
    assert out_q.shape == shape and out_k.shape == k.shape
    out_q.sum().backward()
    assert q.grad.shape == shape and torch.equal(weight.grad, torch.zeros_like(weight))
