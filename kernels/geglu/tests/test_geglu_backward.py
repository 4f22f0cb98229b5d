"""Compare gradients with float64."""

import pytest
import torch
from reference_geglu import ACTIVATIONS, GATES, HIDDEN, eager, gradients, of_halves, of_pair, random, split
from testing import DTYPES, assert_as_good, doubles


@pytest.mark.kernels_ci
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, h) for h in HIDDEN] + [(1, 64), (700, 64), (2, 150, 136), (333, 65)])
def test_backward(shape, dtype, activation):
    x = random(*shape[:-1], 2 * shape[-1], dtype=dtype, requires_grad=True)
    grad = random(*shape, dtype=dtype)
    for gate in GATES:

        def by_hand(x, gate=gate):
            return eager(*split(x, gate), activation)

        (expected,), (reference,), (actual,) = (
            gradients(by_hand, doubles([x]), grad),
            gradients(by_hand, [x], grad),
            gradients(lambda x, gate=gate: of_halves(x, activation, gate), [x], grad),
        )
        assert_as_good(actual, reference, expected)
        halves = [h.detach().requires_grad_() for h in split(x, gate)]
        pair = gradients(lambda g, u: of_pair(g, u, activation), halves, grad)
        for gradient, half in zip(pair, split(actual, gate)):
            assert torch.equal(gradient, half)
