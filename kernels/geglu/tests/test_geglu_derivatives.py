"""Compare forward mode, transforms of torch.func and second derivatives with float64."""

import pytest
import torch
from differentiate import assert_derivatives
from reference_geglu import ACTIVATIONS, GATES, eager, of_halves, of_pair, random, split
from testing import DTYPES


@pytest.mark.kernels_ci
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives(dtype, activation):
    traced = activation == "gelu" and dtype == torch.float32
    x, up = random(2, 3, 16, dtype=dtype), random(2, 3, 16, dtype=dtype)
    for gate in GATES:
        assert_derivatives(
            lambda x, gate=gate: of_halves(x, activation, gate),
            lambda x, gate=gate: eager(*split(x, gate), activation),
            (x,),
            traced and gate == "second",
        )
    assert_derivatives(
        lambda gate, up: of_pair(gate, up, activation), lambda gate, up: eager(gate, up, activation), (x, up)
    )
