"""Compare forward mode, transforms of torch.func and second derivatives with float64."""

import pytest
import torch
from differentiate import assert_derivatives
from reference_geglu import ACTIVATIONS, GATES, eager, kernel, of_halves, of_pair, random, split
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


def test_second_derivative_of_a_layer():
    """Only tensors that need a gradient have a second derivative."""
    x = random(2, 8, dtype=torch.float32, requires_grad=True)
    (grad,) = torch.autograd.grad(kernel.swiglu_pair(x, x.detach()).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    expected = torch.func.hessian(lambda y: eager(y, x, "silu").sum())(x).flatten(0, 1).flatten(1)
    torch.testing.assert_close(second.flatten(), expected.diagonal())
