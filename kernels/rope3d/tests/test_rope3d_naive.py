"""Compare the naive kernel with float64."""

import pytest
from reference_rope3d import GRID, PROJECT, TOKENS, assert_as_good, points, wan_angles, wan_widths
from testing import DTYPES, gpu, load, random


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 6, 10, 16, 44, 64, 72, 128, 130, 1000])
def test_naive(dim, dtype):
    q, k = random(2, TOKENS, 3, dim, dtype=dtype), random(2, TOKENS, 1, dim, dtype=dtype)
    angles = wan_angles(points(GRID), wan_widths(dim))
    for rotated, x in zip(load(PROJECT / "naive").rope3d(q, k, GRID), (q, k)):
        assert_as_good(rotated, x, angles)
