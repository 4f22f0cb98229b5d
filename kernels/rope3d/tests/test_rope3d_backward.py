"""Compare gradients with float64."""

import pytest
import torch
from reference_rope3d import GRID, TOKENS, assert_as_good, kernel, ltx_angles, points, wan_angles, wan_widths
from testing import DTYPES, random


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dim", [10, 64])
@pytest.mark.parametrize("inplace", [False, True])
def test_backward(inplace, dim, half, dtype):
    leaves = [random(2, TOKENS, heads, dim, dtype=dtype, requires_grad=True) for heads in (3, 1)]
    grads = [random(2, TOKENS, heads, dim, dtype=dtype) for heads in (3, 1)]
    q, k = (leaf.clone() for leaf in leaves) if inplace else leaves
    outs = kernel.rope3d(q, k, GRID, pairs="half" if half else "interleaved", inplace=inplace)
    angles = wan_angles(points(GRID), wan_widths(dim))
    for actual, grad in zip(torch.autograd.grad(outs, leaves, grads), grads):
        assert_as_good(actual, grad, -angles, half)


def test_backward_in_turn():
    q = random(2, TOKENS, 130, dtype=torch.float32, requires_grad=True)
    out, _ = kernel.rope3d(q, None, GRID, order="in_turn", layout="bsc")
    grad = random(2, TOKENS, 130, dtype=torch.float32)
    (actual,) = torch.autograd.grad(out, q, grad)
    assert_as_good(actual.unsqueeze(2), grad.unsqueeze(2), -ltx_angles(points(GRID), 130))


def test_in_place_is_noticed():
    """Autograd refuses a gradient that needs a value which the rotation has overwritten."""
    x = random(1, TOKENS, 2, 16, dtype=torch.float32, requires_grad=True)
    y = x * 2
    loss = y.square()
    with torch.no_grad():
        kernel.rope3d(y, None, GRID, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
    with pytest.raises(RuntimeError, match="leaf"):
        kernel.rope3d(x, None, GRID, inplace=True)
