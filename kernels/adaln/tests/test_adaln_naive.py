"""Compare the naive kernel with float64."""

import pytest
from reference_adaln import EPS, HIDDEN, PROJECT, eager, exact, modulations
from testing import DTYPES, assert_as_good, gpu, load, random


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_naive(dtype):
    naive = load(PROJECT / "naive")
    for hidden in HIDDEN:
        for batch, tokens in [(1, 1), (2, 3), (0, 3)]:
            x = random(batch, tokens, hidden, dtype=dtype)
            scale, shift = modulations("[B, 1, C]", batch, tokens, hidden, dtype)
            actual = naive.ada_layer_norm(x, scale, shift, EPS)
            assert_as_good(actual, eager(x, scale, shift), exact(x, scale, shift))
