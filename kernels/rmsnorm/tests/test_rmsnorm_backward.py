"""Compare gradients with float64."""

import pytest
import torch
from reference_rmsnorm import HIDDEN, assert_add_gradients, eager, exact, kernel
from testing import DTYPES, assert_gradients, random


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(5, h) for h in HIDDEN]
    + [(1, 64), (700, 64), (2, 150, 136), (300, 1000)]
    # Row lengths that are not a multiple of a vector: the alignment repeats after a number of rows; there are as many
    # rows, fewer, and more.
    + [(1, 4097), (2, 8191), (7, 65), (8, 1002), (9, 1001), (300, 4095), (700, 63), (2000, 7)],
)
def test_backward(shape, dtype):
    x = random(*shape, dtype=dtype, requires_grad=True)
    grad = random(*shape, dtype=dtype)
    assert_gradients(kernel.rms_norm, eager, exact, [x], [grad])
    for weight_dtype in {dtype, torch.float32}:
        weight = random(shape[-1], dtype=weight_dtype, requires_grad=True)
        assert_gradients(kernel.rms_norm, eager, exact, [x, weight], [grad])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("hidden", [1, 33, 128, 1001, 4096, 20001])
def test_add_backward(hidden, rows, dtype):
    x, residual = (random(rows, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = random(hidden, dtype=dtype, requires_grad=True)
    assert_add_gradients(x, residual, weight, [random(rows, hidden, dtype=dtype) for _ in range(2)])
