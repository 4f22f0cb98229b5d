"""Compare the naive kernel with float64."""

import pytest
from reference_rmsnorm import EPS, HIDDEN, PROJECT, eager, exact
from testing import DTYPES, assert_as_good, gpu, load, random


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_naive(dtype):
    naive = load(PROJECT / "naive")
    for hidden in HIDDEN:
        for shape in [(1, hidden), (2, 3, hidden), (0, hidden)]:
            x, weight = random(*shape, dtype=dtype), random(hidden, dtype=dtype)
            assert_as_good(naive.rms_norm(x, weight, EPS), eager(x, weight), exact(x, weight))
