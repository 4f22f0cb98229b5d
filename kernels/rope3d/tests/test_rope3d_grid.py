"""Compare rotations on a grid of tokens with float64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reference_rope3d import (
    DIMS,
    GRID,
    TOKENS,
    assert_as_good,
    kernel,
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
