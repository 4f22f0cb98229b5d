"""Test layouts, strides, prefixes, empty tensors and special values."""

import math

import pytest
import torch
from reference_rope3d import (
    GRID,
    TOKENS,
    assert_agrees,
    assert_as_good,
    kernel,
    layouts_of,
    points,
    rotated,
    wan_angles,
    wan_widths,
)
from testing import DEVICE, DTYPES, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [10, 64])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("prefix", [0, 7])
@pytest.mark.parametrize("inplace", [False, True])
def test_layouts(inplace, prefix, half, dim, dtype):
    """Every layout and stride, in place or not, gives the result of the contiguous layout."""
    tokens = TOKENS + prefix
    pairs = "half" if half else "interleaved"
    q, k = random(2, tokens, 5, dim, dtype=dtype), random(2, tokens, 2, dim, dtype=dtype)
    angles = torch.cat([torch.zeros(prefix, dim // 2), wan_angles(points(GRID), wan_widths(dim))])
    want_q, want_k = kernel.rope3d(q, k, GRID, prefix=prefix, pairs=pairs)
    assert_as_good(want_q, q, angles, half)
    assert torch.equal(want_q[:, :prefix], q[:, :prefix]) and torch.equal(want_k[:, :prefix], k[:, :prefix])

    for name, (layout, a, b) in layouts_of(q, k).items():
        before = a.clone()
        head_dim = dim if layout == "bsc" else None
        form = {"layout": layout, "head_dim": head_dim, "prefix": prefix, "pairs": pairs}
        out_q, out_k = kernel.rope3d(a, b, GRID, inplace=inplace, **form)
        for out, x, want in ((out_q, a, want_q), (out_k, b, want_k)):
            if inplace:
                assert out is x, name
            else:
                assert out.is_contiguous() and out.shape == x.shape, name
            wanted = want.transpose(1, 2) if layout == "bhsd" else want.flatten(2) if layout == "bsc" else want
            # A compiler contracts the arithmetic of vectors and of single elements differently.
            torch.testing.assert_close(out, wanted, msg=name)
        assert inplace or torch.equal(a, before), name


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("half", [False, True])
def test_many_tokens(half):
    """Enough tokens that a launch divides them differently with heads first, and more heads than fit one block."""
    for grid, heads, dim in (((3, 30, 31), 7, 64), (GRID, 75, 128)):
        q, k = (random(1, math.prod(grid), h, dim, dtype=torch.bfloat16) for h in (heads, 3))
        wanted = [rotated(x, wan_angles(points(grid), wan_widths(dim)), half) for x in (q, k)]
        for layout in ("bshd", "bhsd"):
            order = (0, 2, 1, 3) if layout == "bhsd" else (0, 1, 2, 3)
            given = [x.permute(order).contiguous() for x in (q, k)]
            outs = kernel.rope3d(*given, grid, layout=layout, pairs="half" if half else "interleaved")
            for out, want in zip(outs, wanted):
                assert_agrees(out.permute(order), want.bfloat16())


@pytest.mark.parametrize("rotate", ["rope3d", "apply_rotary"])
@pytest.mark.parametrize("grad_enabled", [False, True])
def test_autograd_notices_writes_in_place(grad_enabled, rotate):
    """Autograd refuses a gradient that needs a value which the rotation has overwritten."""
    arguments = (GRID,) if rotate == "rope3d" else torch.rand(2, TOKENS, 8, device=DEVICE)
    x = random(1, TOKENS, 2, 16, dtype=torch.float32, requires_grad=True)
    y = x * 2
    loss = y.square()
    with torch.set_grad_enabled(grad_enabled):
        getattr(kernel, rotate)(y, None, *arguments, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
    with pytest.raises(RuntimeError, match="leaf"):
        getattr(kernel, rotate)(x, None, *arguments, inplace=True)


def test_what_lies_between_is_not_written():
    storage = random(2, TOKENS, 3, 80, dtype=torch.bfloat16)
    before = storage.clone()
    kernel.rope3d(storage[..., 8:72], None, GRID, inplace=True)
    assert torch.equal(storage[..., :8], before[..., :8]) and torch.equal(storage[..., 72:], before[..., 72:])
    assert not torch.equal(storage[..., 8:72], before[..., 8:72])


def test_elements_apart():
    q = random(1, TOKENS, 64, 4, dtype=torch.float32).transpose(2, 3)
    assert torch.equal(kernel.rope3d(q, None, GRID)[0], kernel.rope3d(q.contiguous(), None, GRID)[0])
    with pytest.raises(RuntimeError, match="q must have adjacent elements"):
        kernel.rope3d(q, None, GRID, inplace=True)
    with pytest.raises(RuntimeError, match="k must have adjacent elements"):
        kernel.rope3d(q.contiguous(), q, GRID, inplace=True)


@pytest.mark.parametrize("shape", [(0, TOKENS, 2, 64), (2, TOKENS, 0, 64), (2, TOKENS, 2, 0), (2, 0, 2, 64)])
@pytest.mark.parametrize("inplace", [False, True])
def test_empty(inplace, shape):
    grid = GRID if shape[1] else (0, 4, 5)
    q = random(*shape, dtype=torch.float16).requires_grad_(not inplace)
    k = random(2, TOKENS, 2, 64, dtype=torch.float16) if shape[2] == 0 else q
    out_q, out_k = kernel.rope3d(q, k.detach(), grid, inplace=inplace)
    assert out_q.shape == shape and out_k.shape == k.shape
    if not inplace:
        out_q.sum().backward()
        assert q.grad.shape == shape
