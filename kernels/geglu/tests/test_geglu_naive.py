"""Compare the naive kernel with float64."""

import pytest
import torch
from reference_geglu import ACTIVATIONS, HIDDEN, PROJECT, eager, random
from testing import DTYPES, assert_as_good, gpu, load


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_naive(activation, dtype):
    naive = load(PROJECT / "naive")
    for hidden in HIDDEN:
        for rows in [(1,), (2, 3), (0,)]:
            x = random(*rows, 2 * hidden, dtype=dtype)
            up, gate = x.chunk(2, -1)
            expected = eager(gate.double(), up.double(), activation)
            reference = eager(gate.float(), up.float(), activation).to(dtype)
            assert_as_good(naive.of_halves(x, activation), reference, expected)
            pair = naive.of_pair(gate.contiguous(), up.contiguous(), activation)
            assert torch.equal(pair, naive.of_halves(x, activation))
