"""Compare gradients with float64."""

import pytest
import torch
from reference_rmsnorm import HIDDEN, assert_add_gradients, eager, exact, gradients_of_rows, kernel
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


def test_only_what_needs_a_gradient_gets_one():
    x, weight = random(4, 64, dtype=torch.float32), random(64, dtype=torch.float32)
    assert not kernel.rms_norm(x, weight).requires_grad
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(kernel.rms_norm(x, weight).sum(), weight)
    expected = exact(x).sum(0).float()
    torch.testing.assert_close(grad, expected)
    with torch.no_grad():
        assert not kernel.rms_norm(x, weight).requires_grad


@pytest.mark.parametrize("used", [0, 1])
def test_gradient_through_one_of_two_results(used):
    x, residual = (random(4, 64, dtype=torch.float32, requires_grad=True) for _ in range(2))
    weight = random(64, dtype=torch.float32, requires_grad=True)

    def by_hand(x, residual, weight):
        total = x + residual
        return eager(total, weight), total

    expected, actual = (f(x, residual, weight)[used].sum() for f in (by_hand, kernel.add_rms_norm))
    for inputs in ([x], [residual], [x, residual]):
        a = torch.autograd.grad(actual, inputs, retain_graph=True)
        torch.testing.assert_close(a, torch.autograd.grad(expected, inputs, retain_graph=True))


def test_gradients_are_equal_to_the_bit():
    x, weight = random(1000, 520, dtype=torch.bfloat16), random(520, dtype=torch.float32)
    first = gradients_of_rows(x, x, weight, None)
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        again = gradients_of_rows(x, x, weight, None)
        torch.set_num_threads(before)
        assert all(torch.equal(a, b) for a, b in zip(first, again))
