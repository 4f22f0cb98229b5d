"""Compare forward mode, transforms of torch.func and second derivatives with float64."""

import pytest
import torch
from differentiate import assert_derivatives
from reference_norm_rotary import normed
from reference_norm_rotary import reference as norm_reference
from reference_rope3d import (
    GRID,
    TOKENS,
    joined,
    kernel,
    ltx_angles,
    of_elements,
    points,
    rotated,
    wan_angles,
    wan_widths,
)
from testing import DTYPES, random


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
    turns = of_elements(5, 8)
    cos, sin = (joined(t, half) for t in turns)
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


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_tables_have_derivatives(with_norm, each, half):
    """Learned frequencies: the tables need gradients, and q may need none."""
    q, tables = random(2, 7, 3, 16, dtype=torch.float32), list(random(2, 7, 16 if each else 8, dtype=torch.float32))
    pairs = "half" if half else "interleaved"

    def function(cos, sin, q):
        if with_norm:
            return kernel.norm_rotary(q, None, None, None, cos, sin, pairs=pairs)
        return kernel.apply_rotary(q, None, cos, sin, pairs=pairs)

    def exact(cos, sin, q):
        parts = [tuple(t.chunk(2, -1)) if half else (t[..., ::2], t[..., 1::2]) for t in (cos, sin)]
        return rotated(normed(q, None) if with_norm else q, tuple(parts) if each else (cos, sin), half)

    assert_derivatives(function, exact, (*tables, q))
    leaves = [table.requires_grad_() for table in tables]
    weights = torch.randn_like(q)
    actual = torch.autograd.grad(function(*leaves, q)[0], leaves, weights)
    doubles = [table.detach().double().requires_grad_() for table in tables]
    expected = torch.autograd.grad(exact(*doubles, q.double()), doubles, weights.double())
    torch.testing.assert_close([grad.double() for grad in actual], list(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [False, True])
def test_derivatives_with_entries_of_elements(half, dtype):
    q, k = random(2, 7, 3, 16, dtype=dtype), random(2, 7, 1, 16, dtype=dtype)
    turns = of_elements(5, 6)
    tables = [joined(t, half) for t in turns]
    form = {"pairs": "half" if half else "interleaved", "prefix": 2, "rotary_dim": 12}

    def exact(q, k):
        return tuple(torch.cat((x[:, :2], rotated(x[:, 2:], turns, half)), 1) for x in (q, k))

    assert_derivatives(lambda q, k: kernel.apply_rotary(q, k, *tables, **form), exact, (q, k))


def test_no_table_is_kept_from_a_transform():
    q = random(1, TOKENS, 1, 14, dtype=torch.float32)
    kept = len(kernel.rotary._kept.entries)
    torch.func.grad(lambda q: kernel.rope3d(q, None, GRID)[0].sum())(q)
    assert len(kernel.rotary._kept.entries) == kept
    kernel.rope3d(q, None, GRID)
    assert len(kernel.rotary._kept.entries) == kept + 1
