"""Compare rotations by given positions and tables with float64."""

import pytest
import torch
from reference_rope3d import (
    GRID,
    TOKENS,
    assert_as_good,
    joined,
    kernel,
    layouts_of,
    ltx_angles,
    of_elements,
    points,
    wan_angles,
    wan_widths,
)
from testing import DEVICE, DTYPES, random


@pytest.mark.parametrize("tensors", [False, True])
def test_positions_of_axes(tensors):
    q = random(2, TOKENS, 2, 64, dtype=torch.float32)
    axes = [torch.rand(size, dtype=torch.float64) * 9 for size in GRID]
    angles = wan_angles(torch.cartesian_prod(*axes).t(), wan_widths(64))
    given = [axis.to(DEVICE) for axis in axes] if tensors else [axis.tolist() for axis in axes]
    assert_as_good(kernel.rope3d(q, None, GRID, positions=given)[0], q, angles)


@pytest.mark.parametrize("batch", [(), (1,), (2,)])
@pytest.mark.parametrize("order", ["contiguous", "in_turn"])
def test_positions_of_tokens(order, batch):
    q = random(2, 50, 2, 70, dtype=torch.float32)
    fractions = [torch.rand(*batch, 50, dtype=torch.float64) for _ in range(3)]
    positions = [2 * fraction - 1 for fraction in fractions]
    angles = wan_angles(positions, wan_widths(70)) if order == "contiguous" else ltx_angles(positions, 70)
    out, _ = kernel.rope3d(q, None, positions=[f.to(DEVICE) for f in fractions], scale=2, offset=-1, order=order)
    assert_as_good(out, q, angles)


@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(30,), (1, 30), (2, 30)])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 32, 40, 12])
def test_tables(rotary_dim, half, shape, table_dtype):
    """One entry for each pair, or for each element, which gives the same bits if both elements have the same."""
    q, k = random(2, 30, 4, 64, dtype=torch.bfloat16), random(2, 30, 2, 64, dtype=torch.bfloat16)
    entries = of_elements(*shape, (rotary_dim or 64) // 2, dtype=table_dtype)
    first = tuple(a for a, _ in entries)
    arguments = {"pairs": "half" if half else "interleaved", "rotary_dim": rotary_dim}

    def assert_rotated(given, expected):
        outs = kernel.apply_rotary(q, k, *given, **arguments)
        for out, x in zip(outs, (q, k)):
            assert_as_good(out, x, expected, half)
        return outs

    assert_rotated([joined(t, half) for t in entries], entries)
    once = assert_rotated(first, first)
    twice = assert_rotated([joined((t, t), half) for t in first], first)
    assert all(map(torch.equal, once, twice))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(10, None), (64, None), (64, 32), (64, 12)])
def test_entries_of_elements(dim, rotary_dim, half, dtype):
    """In every layout, after a prefix, in place or not; the gradient is that of the transposed matrices."""
    shape = 2, 11, (rotary_dim or dim) // 2
    (cos_a, cos_b), (sin_a, sin_b) = entries = of_elements(*shape, dtype=dtype)
    tables = [joined(t, half) for t in entries]
    q, k, grad_q, grad_k = (random(2, 14, heads, dim, dtype=dtype) for heads in (5, 2, 5, 2))
    expected, transposed = entries, ((cos_a, cos_b), (-sin_b, -sin_a))
    form = {"pairs": "half" if half else "interleaved", "rotary_dim": rotary_dim, "prefix": 3}

    for name, (layout, a, b) in layouts_of(q, k).items():
        form.update(layout=layout, head_dim=dim if layout == "bsc" else None)

        def back(outs, layout=layout):
            return [
                t.transpose(1, 2) if layout == "bhsd" else t.unflatten(-1, (-1, dim)) if layout == "bsc" else t
                for t in outs
            ]

        leaves = [t.detach().requires_grad_() for t in (a, b)]
        outs = kernel.apply_rotary(*leaves, *tables, **form)
        grads = [
            grad.transpose(1, 2) if layout == "bhsd" else grad.view_as(o) for grad, o in zip((grad_q, grad_k), outs)
        ]
        gradients = torch.autograd.grad(outs, leaves, grads)
        inplace = kernel.apply_rotary(a, b, *tables, inplace=True, **form)
        for results, given, turns in (
            (outs, (q, k), expected),
            (inplace, (q, k), expected),
            (gradients, (grad_q, grad_k), transposed),
        ):
            for out, x in zip(back(results), given):
                assert torch.equal(out[:, :3], x[:, :3]), name
                assert_as_good(out[:, 3:], x[:, 3:], turns, half)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("shape", [(405,), (6, 405)])
def test_tables_of_many_sequences(shape):
    """More sequences than share a table row, and more tokens than a block takes; shared and separate tables."""
    q, k = random(6, 405, 8, 64, dtype=torch.bfloat16), random(6, 405, 2, 64, dtype=torch.bfloat16)
    angles = torch.rand(*shape, 32, dtype=torch.float64) * 7
    cos, sin = (t.to(DEVICE, torch.float32) for t in (angles.cos(), angles.sin()))
    for out, x in zip(kernel.apply_rotary(q, k, cos, sin), (q, k)):
        assert_as_good(out, x, (cos, sin), False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_qwen_vl(dtype):
    """Positions on three axes for each token, and one sequence of frequencies over the sections."""
    sections, tokens = (16, 24, 24), 50
    q, k = random(2, 4, tokens, 128, dtype=dtype), random(2, 2, tokens, 128, dtype=dtype)
    positions = torch.randint(0, 2000, (3, 2, tokens))
    ladder = 1e6 ** (torch.arange(64, dtype=torch.float64) / -64)
    angles = positions[..., None].double() * ladder
    joined = torch.cat([part[axis] for axis, part in enumerate(angles.split(sections, -1))], -1)
    form = {"order": "sections", "widths": [2 * n for n in sections], "theta": 1e6, "pairs": "half", "layout": "bhsd"}
    for out, x in zip(kernel.rope3d(q, k, positions=positions.to(DEVICE), **form), (q, k)):
        assert_as_good(out.transpose(1, 2), x.transpose(1, 2), joined, half=True)
    q = random(1, 4, TOKENS, 128, dtype=dtype)
    joined = torch.cat([p[:, None] * part for p, part in zip(points(GRID), ladder.split(sections))], -1)
    assert_as_good(kernel.rope3d(q, None, GRID, **form)[0].transpose(1, 2), q.transpose(1, 2), joined, half=True)
