"""Compares the built kernel with Torch, on the GPU if there is one and the kernel has a CUDA backend, else on the CPU.

The public client loads the kernel from `build/`, as it does for users.
"""

import os
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

PROJECT = Path(__file__).resolve().parents[1]
BACKENDS = ${backends}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# No elements, fewer than a vector, whole vectors, a tail, and several blocks with a tail.
SHAPES = [(), (0,), (1,), (64,), (3, 0, 5), (5, 1001), (7, 300, 33)]

DEVICE = "cuda" if "cuda" in BACKENDS and torch.cuda.is_available() else "cpu"
if DEVICE not in BACKENDS and "KERNEL_BUILDER_EMULATOR" not in os.environ:
    pytest.skip("needs a GPU: the kernel has no CPU backend", allow_module_level=True)
kernel = get_local_kernel(PROJECT, backend=DEVICE)


def eager(x):
    return ${formula}  # the kernel's formula


def assert_same(actual, expected):
    # Exactly, since the operator selects elements. One that adds or multiplies also rounds: remove `rtol` and `atol`,
    # which leaves the tolerances of each dtype to Torch.
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def gradient(function, x):
    return torch.autograd.grad(function(x), x, torch.ones_like(x))[0]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, dtype):
    x = random(*shape, dtype=dtype)
    assert_same(kernel.${operator}(x), eager(x))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape, dtype):
    x, grad = random(*shape, dtype=dtype).requires_grad_(), random(*shape, dtype=dtype)
    (expected,) = torch.autograd.grad(eager(x), x, grad)
    (actual,) = torch.autograd.grad(kernel.${operator}(x), x, grad)
    assert_same(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype):
    values = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0]
    x = torch.tensor(values, device=DEVICE, dtype=dtype).requires_grad_()
    for actual, expected in ((kernel.${operator}(x), eager(x)), (gradient(kernel.${operator}, x), gradient(eager, x))):
        assert_same(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_and_strided_tensors(dtype):
    for x in (random(1001, dtype=dtype)[1:], random(6, 8, 10, dtype=dtype).transpose(0, 2)[::2]):
        x.requires_grad_()
        assert_same(kernel.${operator}(x), eager(x))
        assert_same(gradient(kernel.${operator}, x), gradient(eager, x))


def test_errors_name_the_argument():
    with pytest.raises(RuntimeError, match="x must be float32, float16 or bfloat16"):
        kernel.${operator}(torch.zeros(3, device=DEVICE, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"grad must have shape \[3\], not \[4\]"):
        kernel.op.ops.${operator}_backward(torch.zeros(4, device=DEVICE), torch.zeros(3, device=DEVICE))


def test_opcheck():
    for x in (random(4, 5), random(5, 4).t()):
        torch.library.opcheck(kernel.op.ops.${operator}.default, (x,))
        torch.library.opcheck(kernel.op.ops.${operator}_backward.default, (torch.ones_like(x), x))


def test_forward_mode():
    x, tangent = random(4), random(4)
    expected = torch.func.jvp(eager, (x,), (tangent,))
    torch.testing.assert_close(torch.func.jvp(kernel.${operator}, (x,), (tangent,)), expected)
    with torch.autograd.forward_ad.dual_level():
        dual = kernel.${operator}(torch.autograd.forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(tuple(torch.autograd.forward_ad.unpack_dual(dual)), expected)


def test_second_derivative_is_refused():
    x = random(4).requires_grad_()
    (grad,) = torch.autograd.grad(kernel.${operator}(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second time"):
        grad.sum().backward()


def test_compile():
    compiled = torch.compile(lambda x: kernel.${operator}(x) + 1, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = random(rows, 8).requires_grad_()
        torch.testing.assert_close(compiled(x), eager(x) + 1)
        torch.testing.assert_close(gradient(compiled, x), gradient(eager, x))


def test_layer():
    x = random(4, 5)
    replaced = ${replaced}
    assert_same(kernel.layers.${layer}.forward(replaced, x), replaced(x))
