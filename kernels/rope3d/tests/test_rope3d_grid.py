"""Compare rotations on a grid of tokens with float64: layouts, strides, prefixes, empty tensors and kept tables."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from reference_rope3d import (
    DIMS,
    GRID,
    TOKENS,
    assert_agrees,
    assert_as_good,
    joined,
    kernel,
    layouts_of,
    ltx_angles,
    points,
    rotated,
    wan_angles,
    wan_widths,
)
from testing import DEVICE, DTYPES, random


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("half", [False, True])
def test_grid(dim, dtype, half):
    """Results and gradients, in place or not."""
    leaves, grads = ([random(2, TOKENS, heads, dim, dtype=dtype) for heads in (3, 1)] for _ in range(2))
    angles = wan_angles(points(GRID), wan_widths(dim))
    pairs = "half" if half else "interleaved"
    for inplace in (False, True):
        given = [leaf.requires_grad_() for leaf in leaves]
        outs = kernel.rope3d(*((x.clone() for x in given) if inplace else given), GRID, pairs=pairs, inplace=inplace)
        for out, x, gradient, grad in zip(outs, leaves, torch.autograd.grad(outs, given, grads), grads):
            assert out.is_contiguous()
            assert_as_good(out.detach(), x.detach(), angles, half)
            assert_as_good(gradient, grad, -angles, half)
    alone, none = kernel.rope3d(leaves[0], None, GRID, pairs=pairs)
    assert none is None and torch.equal(alone, outs[0])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [4, 6, 16, 64, 130, 1000, 1544, 2048, 4102, 8208])
def test_in_turn(dim, dtype):
    """As in LTX: over the whole width, with positions between -1 and 1."""
    scale = tuple(2 / size for size in GRID)
    q, k = (random(2, TOKENS, dim, dtype=dtype, requires_grad=True) for _ in range(2))
    angles = ltx_angles([p * s - 1 for p, s in zip(points(GRID), scale)], dim)
    outs = kernel.rope3d(q, k, GRID, order="in_turn", layout="bsc", scale=scale, offset=-1)
    grads = [random(2, TOKENS, dim, dtype=dtype) for _ in range(2)]
    for out, x, gradient, grad in zip(outs, (q, k), torch.autograd.grad(outs, (q, k), grads), grads):
        assert_as_good(out.detach().unsqueeze(2), x.detach().unsqueeze(2), angles)
        if dim <= 130:  # the bound for each element is for few of them
            assert_as_good(gradient.unsqueeze(2), grad.unsqueeze(2), -angles)
        assert torch.equal(out[..., : dim % 6], x[..., : dim % 6])
    tables = (joined((t, t), False).to(DEVICE, torch.float32) for t in (angles.cos(), angles.sin()))
    for out, x in zip(kernel.apply_rotary(q.detach(), k.detach(), *tables, layout="bsc"), (q, k)):
        assert_as_good(out.unsqueeze(2), x.detach().unsqueeze(2), angles)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("widths", [(16, 24, 24), (8, 12, 12), (0, 2, 6), (64, 0, 0), (2, 2, 2), (10, 30, 8)])
def test_widths(widths, half, dtype):
    """With widths and a theta for each axis; elements beyond the widths are copied, also if not finite."""
    theta = (256.0, 10.0, 1e6)
    q = random(1, TOKENS, 2, 64, dtype=dtype)
    q[0, :, :, sum(widths) :][3] = float("inf")
    out, _ = kernel.rope3d(q, None, GRID, widths=widths, theta=theta, pairs="half" if half else "interleaved")
    rotary = sum(widths)
    assert torch.equal(out[..., rotary:], q[..., rotary:])
    assert_as_good(out[..., :rotary], q[..., :rotary], wan_angles(points(GRID), widths, theta), half)


def test_large_positions():
    """An angle in float32 would be wrong by a sixteenth at such positions."""
    offset = (2.0**20 - 3, 2.0**20, 2.0**19 + 1)
    q = random(1, TOKENS, 1, 128, dtype=torch.float32)
    positions = [p + o for p, o in zip(points(GRID), offset)]
    out, _ = kernel.rope3d(q, None, GRID, offset=offset)
    assert_as_good(out, q, wan_angles(positions, wan_widths(128)))


def test_tables_are_kept_apart():
    """Calls that differ in one argument do not get each other's tables."""
    q = random(1, TOKENS, 1, 64, dtype=torch.float32)
    calls = [
        {},
        {"theta": 100.0},
        {"theta": (100.0, 10.0, 100.0)},
        {"scale": 0.5},
        {"offset": 0.5},
        {"widths": [20, 22, 22]},
        {"order": "in_turn"},
        {"positions": [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 5]]},
    ]
    first = [kernel.rope3d(q, None, GRID, **arguments)[0] for arguments in calls]
    for i, out in enumerate(first):
        assert all(not torch.equal(out, other) for other in first[:i])
        assert torch.equal(out, kernel.rope3d(q, None, GRID, **calls[i])[0])
    with torch.inference_mode():
        kernel.rope3d(q, None, GRID, theta=77.0)
    q.requires_grad_()
    # Autograd can save the table, which is no inference tensor.
    kernel.rope3d(q, None, GRID, theta=77.0)[0].sum().backward()


def test_no_table_is_kept_for_what_may_change():
    q = random(1, TOKENS, 1, 64, dtype=torch.float32)
    second, third = (0.0, 1.0, 2.0, 3.0), range(5)
    first, numbers = torch.tensor(0.0), [100.0, 10.0, 100.0]
    for changed, arguments in (
        (theta := torch.tensor(numbers), {"theta": theta}),
        (scale := np.array(numbers), {"scale": scale}),
        (first, {"positions": [(first, 1.0, 2.0), second, third]}),
        (axis := np.array([0.0, 1.0, 2.0]), {"positions": [axis, second, third]}),
    ):
        before = kernel.rope3d(q, None, GRID, **arguments)[0]
        changed.__iadd__(5.0)
        assert not torch.equal(before, kernel.rope3d(q, None, GRID, **arguments)[0])


def test_tables_kept_are_bounded():
    kept = kernel.tables.Kept(most_bytes=100)
    for size in (10, 5, 12, 8, 3, 2, 1):
        kept.keep(size, torch.zeros(size, device=DEVICE))
    assert list(kept.entries) == [10, 5, 8, 2]


def test_threads_share_tables():
    q = random(1, TOKENS, 2, 64, dtype=torch.float32)
    wanted = [rotated(q, wan_angles(points(GRID), wan_widths(64), (100.0 + i,) * 3)) for i in range(8)]

    def rotate(i):
        out, _ = kernel.rope3d(q, None, GRID, theta=100.0 + i % 8)
        return torch.allclose(out.double(), wanted[i % 8], atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(rotate, range(64)))


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


def test_in_place_errors_precede_all_writes():
    leaf = random(1, TOKENS, 2, 16, requires_grad=True)
    whole = leaf.repeat(1, 1, 2, 1)
    refused = {
        "leaf": leaf,
        "multiple views": whole.chunk(2, 2)[1],
        "k must not be expanded": whole[:, :, :1].expand(-1, -1, 3, -1),
        "k must not be q, nor share memory": whole[:, :, 1:],
    }
    q, before = whole[:, :, :2], whole.detach().clone()
    for message, k in refused.items():
        with pytest.raises(RuntimeError, match=message):
            kernel.rope3d(q, k, GRID, inplace=True)
        assert torch.equal(whole, before), message
    with pytest.raises(RuntimeError, match="leaf"):
        kernel.rope3d(torch.nn.Parameter(q.detach(), requires_grad=False), leaf, GRID, inplace=True)
    assert torch.equal(whole, before)
    with torch.no_grad(), pytest.raises(RuntimeError, match="k must not be q, nor share memory"):
        kernel.rope3d(q, whole[:, :, 1:], GRID, inplace=True)


def test_slices_of_a_projection_are_rotated_in_place():
    leaf = random(1, TOKENS, 5, 16, requires_grad=True)
    results = []
    for inplace in (False, True):
        whole = leaf * 2
        out = kernel.rope3d(whole[:, :, :2], whole[:, :, 2:4], GRID, inplace=inplace)
        whole = whole if inplace else torch.cat((*out, whole[:, :, 4:]), 2)
        results.append([*out, *torch.autograd.grad(whole.square().sum(), leaf)])
    assert all(map(torch.equal, *results))


def test_negated_views_are_refused_in_place():
    negated = torch.complex(*random(2, 1, TOKENS, 2, 16)).conj().imag
    before, plain = negated.clone(), random(1, TOKENS, 2, 16)
    for q, k in ((negated, None), (plain.clone(), negated)):
        with pytest.raises(RuntimeError, match="negated view"):
            kernel.rope3d(q, k, GRID, inplace=True)
    assert torch.equal(negated, before)
    assert torch.equal(kernel.rope3d(negated, None, GRID)[0], kernel.rope3d(before, None, GRID)[0])


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
    q = q.contiguous()
    with pytest.raises(RuntimeError, match="q must not be expanded"):
        kernel.rope3d(q.expand(2, -1, -1, -1), None, GRID, inplace=True)
    with pytest.raises(RuntimeError, match="k must not be q"):
        kernel.rope3d(q, q, GRID, inplace=True)


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
