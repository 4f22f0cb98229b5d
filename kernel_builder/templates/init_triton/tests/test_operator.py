"""Compares the built kernel with Torch, on a GPU.

The public client loads the kernel from `build/`, as it does for users: the package that was compiled ahead of time, or
else the Python package, in which Triton compiles the kernels at the first call.
"""

from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

PROJECT = Path(__file__).resolve().parents[1]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# No elements, fewer than a vector, whole vectors, a tail, and several blocks with a tail.
SHAPES = [(), (0,), (1,), (64,), (3, 0, 5), (5, 1001), (7, 300, 33)]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
kernel = get_local_kernel(PROJECT, backend="cuda") if torch.cuda.is_available() else None


def eager(x):
    return ${formula}  # the kernel's formula


def assert_same(actual, expected):
    # Exactly, since the operator selects elements. One that adds or multiplies also rounds: compare with float64, and
    # remove `rtol` and `atol`, which leaves the tolerances of each dtype to Torch.
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda", dtype=dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(shape, dtype):
    x, grad = random(*shape, dtype=dtype).requires_grad_(), random(*shape, dtype=dtype)
    actual, expected = kernel.${operator}(x), eager(x.double()).to(dtype)
    assert_same(actual, expected)
    for y in (actual, expected):
        assert_same(torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(eager(x), x, grad)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], device="cuda", dtype=dtype)
    assert_same(kernel.${operator}(x), eager(x))


def test_unaligned_and_strided_tensors():
    for x in (random(1001)[1:], random(6, 8, 10).transpose(0, 2)[::2]):
        assert_same(kernel.${operator}(x), eager(x))


def test_compile():
    compiled = torch.compile(lambda x: kernel.${operator}(x) + 1, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = random(rows, 8).requires_grad_()
        assert_same(compiled(x), eager(x) + 1)
        assert_same(*(torch.autograd.grad(function(x).sum(), x)[0] for function in (compiled, eager)))


def test_layer():
    x = random(4, 5)
    replaced = ${replaced}
    assert_same(kernel.layers.${layer}.forward(replaced, x), replaced(x))
