"""Compare norm_rotary with float64."""

import pytest
import torch
from reference_norm_rotary import FORMS, HEADS, angles, assert_normed_and_rotated, heads_of, tables
from reference_rope3d import joined, kernel, layouts_of, of_elements
from testing import DTYPES, random


def options_of(norm, half):
    return {"norm": norm, "pairs": "half" if half else "interleaved"}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("norm", "half"), FORMS)
@pytest.mark.parametrize(("q_heads", "k_heads", "dim"), HEADS)
def test_forward(q_heads, k_heads, dim, norm, half, dtype):
    inputs, weights = heads_of(q_heads, k_heads, dim, dtype, norm=norm)
    turns = of_elements(7, dim // 2)
    outs = kernel.norm_rotary(*inputs, *weights, *(joined(t, half) for t in turns), **options_of(norm, half))
    assert_normed_and_rotated(outs, inputs, weights, turns, half, norm=norm)


@pytest.mark.parametrize("norm", ["head", "token"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("elements", [1536, 2048, 5120, 8192, 12000, 20000])
def test_long_rows(elements, half, norm):
    """Rows of one head, and of heads of 128 elements where they divide the row."""
    for dim in (elements, 128):
        if elements % dim != 0 or (norm == "head" and dim == 128):
            continue
        inputs, weights = heads_of(elements // dim, elements // dim, dim, torch.bfloat16, 1, 3, norm=norm)
        entries, once = of_elements(3, dim // 2), tables(angles(3, dim // 2))
        for turns, given in ((entries, [joined(t, half) for t in entries]), (once, once)):
            outs = kernel.norm_rotary(*inputs, *weights, *given, **options_of(norm, half))
            assert_normed_and_rotated(outs, inputs, weights, turns, half, norm=norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["last", "before_weight"])
@pytest.mark.parametrize("weight", ["own", "float32", "none"])
@pytest.mark.parametrize("norm", ["head", "token"])
def test_weights(norm, weight, rounding, dtype):
    weight_dtype = torch.float32 if weight == "float32" else dtype
    inputs, weights = heads_of(4, 2, 64, dtype, weight_dtype=weight_dtype, norm=norm)
    weights = [None, None] if weight == "none" else weights
    cos, sin = tables(angles(7, 32))
    for offset in (0.0, 1.0):
        options = {"norm": norm, "rounding": rounding, "offset": offset}
        outs = kernel.norm_rotary(*inputs, *weights, cos, sin, **options)
        assert_normed_and_rotated(outs, inputs, weights, (cos, sin), **options)


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
    for turns, given in ((entries, [joined(t, half) for t in entries]), (first, first)):
        outs = kernel.norm_rotary(*inputs, *weights, *given, rotary_dim=rotary_dim, **options_of("head", half))
        assert_normed_and_rotated(outs, inputs, weights, turns, half)


@pytest.mark.parametrize("half", [False, True])
def test_tables_apart(half):
    """cos and sin with different strides, and entries that are neither one nor two apart."""
    inputs, weights = heads_of(4, 2, 64, torch.bfloat16, tokens=30)
    cos, sin = random(32, 30, dtype=torch.float32).t(), random(30, 64, dtype=torch.float32)[:, 1::2]
    for turns in ((cos, sin), (random(30, 96, dtype=torch.float32)[:, ::3],) * 2):
        outs = kernel.norm_rotary(*inputs, *weights, *turns, **options_of("head", half))
        assert_normed_and_rotated(outs, inputs, weights, turns, half)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [10, 64])
@pytest.mark.parametrize(("norm", "half"), FORMS)
@pytest.mark.parametrize("prefix", [0, 3])
def test_layouts(prefix, norm, half, dim, dtype):
    """Every layout and stride gives the result of the contiguous layout."""
    (q, k), weights = heads_of(5, 2, dim, dtype, tokens=11, norm=norm)
    cos, sin = tables(angles(2, 11 - prefix, dim // 2))
    options = {"prefix": prefix, **options_of(norm, half)}
    wanted = kernel.norm_rotary(q, k, *weights, cos, sin, **options)
    assert_normed_and_rotated(wanted, (q, k), weights, (cos, sin), half, norm=norm, prefix=prefix)

    apart = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k))
    cases = {**layouts_of(q, k), "elements apart": ("bshd", *apart)}
    for name, (layout, a, b) in cases.items():
        form = {"layout": layout, "head_dim": dim if layout == "bsc" else None}
        outs = kernel.norm_rotary(a, b, *weights, cos, sin, **form, **options)
        for out, x, want in zip(outs, (a, b), wanted):
            assert out.is_contiguous() and out.shape == x.shape, name
            back = out.transpose(1, 2) if layout == "bhsd" else out.view(want.shape)
            # Sums are added in another order where rows are read element by element.
            torch.testing.assert_close(back, want, msg=name)


@pytest.mark.parametrize(("norm", "half"), FORMS)
def test_without_k(norm, half):
    (q, k), (weight, _) = heads_of(4, 4, 64, torch.float16, norm=norm)
    cos, sin = tables(angles(7, 32))
    both = kernel.norm_rotary(q, k, weight, weight, cos, sin, **options_of(norm, half))
    alone, none = kernel.norm_rotary(q, None, weight, None, cos, sin, **options_of(norm, half))
    assert none is None and torch.equal(alone, both[0])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("norm", "half"), FORMS)
def test_many_tokens(norm, half):
    """More sequences, tokens and heads than a block has, with one table and with one for each sequence."""
    for shape in ((405,), (3, 405)):
        inputs, weights = heads_of(17, 5, 64, torch.bfloat16, 3, 405, norm=norm)
        cos, sin = tables(angles(*shape, 32))
        outs = kernel.norm_rotary(*inputs, *weights, cos, sin, **options_of(norm, half))
        assert_normed_and_rotated(outs, inputs, weights, (cos, sin), half, norm=norm)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(value, dtype):
    """A value that is not finite changes only the values that are normalized with it."""
    q = random(1, 7, 3, 64, dtype=dtype)
    cos, sin = tables(angles(7, 32))
    want, _ = kernel.norm_rotary(q, None, None, None, cos, sin)
    q[0, 4, 1, 10] = value
    out, _ = kernel.norm_rotary(q, None, None, None, cos, sin)
    assert not out[0, 4, 1, 10:12].isfinite().any()
    out[0, 4, 1] = want[0, 4, 1]
    assert torch.equal(out, want)
