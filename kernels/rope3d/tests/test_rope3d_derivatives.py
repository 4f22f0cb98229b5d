"""Compare forward mode, transforms of torch.func and second derivatives with float64."""

import pytest
import torch
from differentiate import assert_derivatives
from reference_norm_rotary import angles, normed, tables
from reference_norm_rotary import reference as norm_reference
from reference_rope3d import GRID, TOKENS, kernel, ltx_angles, points, rotated, wan_angles, wan_widths
from testing import DEVICE, DTYPES, random


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [False, True])
def test_derivatives_on_a_grid(half, dtype):
    q, k = random(2, TOKENS, 3, 10, dtype=dtype), random(2, TOKENS, 1, 10, dtype=dtype)
    turns = wan_angles(points(GRID), wan_widths(10))
    for inplace in (False, True):

        def rotate(q, k, inplace=inplace):
            if inplace:
                q, k = q * 1, k * 1
            return kernel.rope3d(q, k, GRID, pairs="half" if half else "interleaved", inplace=inplace)

        assert_derivatives(
            rotate,
            lambda q, k: (rotated(q, turns, half), rotated(k, turns, half)),
            (q, k),
            traced=dtype == torch.float32 and not half and not inplace,
        )


def test_derivatives_in_turn():
    q = random(1, TOKENS, 2, 16, dtype=torch.float32)
    turns = ltx_angles(points(GRID), 16)
    assert_derivatives(lambda q: kernel.rope3d(q, None, GRID, order="in_turn"), lambda q: rotated(q, turns), (q,))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["head", "token"])
def test_derivatives_with_norm(norm, dtype):
    half = norm == "token"
    q, k = random(2, 7, 3, 16, dtype=dtype), random(2, 7, 1, 16, dtype=dtype)
    q_weight, k_weight = (random(16 if norm == "head" else 16 * x.shape[2], dtype=dtype) for x in (q, k))
    turns = angles(5, 8)
    cos, sin = tables(turns)
    options = {"norm": norm, "offset": 1.0, "rounding": "before_weight"}

    def exact(q, k, q_weight, k_weight):
        pairs = (q, q_weight), (k, k_weight)
        return tuple(norm_reference(x, weight, turns, half, prefix=2, **options) for x, weight in pairs)

    assert_derivatives(
        lambda *tensors: kernel.norm_rotary(
            *tensors, cos, sin, pairs="half" if half else "interleaved", prefix=2, **options
        ),
        exact,
        (q, k, q_weight, k_weight),
    )


@pytest.mark.parametrize("with_norm", [False, True])
def test_tables_have_derivatives(with_norm):
    """Learned frequencies: the tables need gradients, and q may need none."""
    q, turns = random(2, 7, 3, 16, dtype=torch.float32), angles(7, 8).float().to(DEVICE)

    def function(turns, q):
        if with_norm:
            return kernel.norm_rotary(q, None, None, None, turns.cos(), turns.sin())
        return kernel.apply_rotary(q, None, turns.cos(), turns.sin())

    def exact(turns, q):
        return rotated(normed(q, None) if with_norm else q, turns)

    assert_derivatives(function, exact, (turns, q))
    leaf = turns.requires_grad_()
    weights = torch.randn_like(q)
    (actual,) = torch.autograd.grad(function(leaf, q)[0], leaf, weights)
    double = turns.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(exact(double, q.double()), double, weights.double())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_table_is_kept_from_a_transform():
    q = random(1, TOKENS, 1, 14, dtype=torch.float32)
    kept = len(kernel.rotary._kept.entries)
    torch.func.grad(lambda q: kernel.rope3d(q, None, GRID)[0].sum())(q)
    assert len(kernel.rotary._kept.entries) == kept
    kernel.rope3d(q, None, GRID)
    assert len(kernel.rotary._kept.entries) == kept + 1
