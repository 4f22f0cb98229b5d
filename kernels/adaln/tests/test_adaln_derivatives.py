"""Compare forward mode, transforms of torch.func and second derivatives with float64."""

import pytest
import torch
from differentiate import assert_derivatives
from reference_adaln import EPS, MODULATIONS, formula, gated, kernel, modulations
from testing import DTYPES, random


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MODULATIONS)
def test_derivatives(kind, dtype):
    x, branch = (random(2, 3, 16, dtype=dtype) for _ in range(2))
    scale, shift, gate = modulations(kind, 2, 3, 16, dtype, count=3)
    weight, bias = random(2, 16, dtype=torch.float32)
    traced = kind == "[C]" and dtype == torch.float32
    tensors = x, scale, shift, weight, bias
    assert_derivatives(kernel.ada_layer_norm, formula, tensors)
    assert_derivatives(kernel.ada_rms_norm, lambda *tensors: formula(*tensors[:4], None, EPS, False), tensors[:4])
    assert_derivatives(kernel.gate_residual, gated, (x, branch, gate))

    def exact(residual, branch, gate, scale, shift, weight, bias):
        total = gated(residual, branch, gate)
        return total, formula(total, scale, shift, weight, bias)

    assert_derivatives(kernel.gate_residual_ada_norm, exact, (x, branch, gate, *tensors[1:]), traced)
