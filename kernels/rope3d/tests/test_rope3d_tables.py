"""Compare rotations by given positions and given tables with float64."""

import pytest
import torch
from reference_rope3d import GRID, TOKENS, assert_as_good, kernel, ltx_angles, wan_angles, wan_widths
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
    positions = [torch.rand(*batch, 50, dtype=torch.float64) * 2 - 1 for _ in range(3)]
    angles = wan_angles(positions, wan_widths(70)) if order == "contiguous" else ltx_angles(positions, 70)
    out, _ = kernel.rope3d(q, None, positions=[p.to(DEVICE) for p in positions], order=order)
    assert_as_good(out, q, angles)


@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(30,), (1, 30), (2, 30)])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 40, 12])
def test_tables(rotary_dim, doubled, half, shape, table_dtype):
    q, k = random(2, 30, 4, 64, dtype=torch.bfloat16), random(2, 30, 2, 64, dtype=torch.bfloat16)
    pairs = (rotary_dim or 64) // 2
    angles = torch.rand(*shape, pairs, dtype=torch.float64) * 7
    cos, sin = (t.to(DEVICE, table_dtype) for t in (angles.cos(), angles.sin()))
    given = (
        [torch.cat([t, t], -1) if half else t.repeat_interleave(2, -1) for t in (cos, sin)] if doubled else [cos, sin]
    )
    arguments = {"pairs": "half" if half else "interleaved", "rotary_dim": rotary_dim}
    for out, x in zip(kernel.apply_rotary(q, k, *given, **arguments), (q, k)):
        assert_as_good(out, x, (cos, sin), half)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("shape", [(405,), (6, 405)])
def test_tables_of_many_sequences(shape):
    """More sequences than share a table row, and more tokens than a block takes; shared and separate tables."""
    q, k = random(6, 405, 8, 64, dtype=torch.bfloat16), random(6, 405, 2, 64, dtype=torch.bfloat16)
    angles = torch.rand(*shape, 32, dtype=torch.float64) * 7
    cos, sin = (t.to(DEVICE, torch.float32) for t in (angles.cos(), angles.sin()))
    for out, x in zip(kernel.apply_rotary(q, k, cos, sin), (q, k)):
        assert_as_good(out, x, (cos, sin), False)
