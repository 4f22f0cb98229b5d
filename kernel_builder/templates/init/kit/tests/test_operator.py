"""Compares the built kernel with Torch in float64, on the GPU if there is one, else on the CPU.

The public client loads the kernel from `build/`, as it does for users.
"""

from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

PROJECT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# No elements, fewer than a vector, whole vectors, a tail, and several blocks with a tail.
SHAPES = [(), (0,), (1,), (64,), (3, 0, 5), (5, 1001), (7, 300, 33)]

kernel = get_local_kernel(PROJECT, backend=DEVICE)


def eager(x):
    return ${formula}  # the kernel's formula


def random(*shape, dtype=torch.float32):
    return 4 * torch.randn(shape, device=DEVICE, dtype=dtype)


def assert_rounded(actual, expected):
    """Compare with a result in float64: within one unit in the last place, as after a single rounding."""
    assert actual.is_contiguous()
    rounding = max(torch.finfo(actual.dtype).eps, 1e-6)
    torch.testing.assert_close(actual.double(), expected, rtol=rounding, atol=1e-6)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, dtype):
    x = random(*shape, dtype=dtype)
    assert_rounded(kernel.${operator}(x), eager(x.double()))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape, dtype):
    x, grad = random(*shape, dtype=dtype).requires_grad_(), random(*shape, dtype=dtype)
    (actual,) = torch.autograd.grad(kernel.${operator}(x), x, grad)
    double = x.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(eager, double.flatten()[:20])  # the reference is correct
    (expected,) = torch.autograd.grad(eager(double), double, grad.double())
    assert_rounded(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_and_strided_tensors(dtype):
    for x in (random(1001, dtype=dtype)[1:], random(6, 8, 10, dtype=dtype).transpose(0, 2)[::2]):
        assert torch.equal(kernel.${operator}(x), kernel.${operator}(x.clone(memory_format=torch.contiguous_format)))
        grad = random(*x.shape, dtype=dtype)
        contiguous = x.clone(memory_format=torch.contiguous_format)
        assert torch.equal(kernel.op.ops.${operator}_backward(grad, x), kernel.op.ops.${operator}_backward(grad, contiguous))


def test_special_values():
    y = kernel.${operator}(torch.tensor([float("nan"), float("inf"), 100.0, -100.0, 0.0], device=DEVICE))
    assert y[0].isnan()
    torch.testing.assert_close(y[1:].tolist(), [float("inf"), 100.0, 0.0, 0.0])


def test_only_what_needs_a_gradient_gets_one():
    x = random(4).requires_grad_()
    assert kernel.${operator}(x).requires_grad
    assert not kernel.${operator}(x.detach()).requires_grad
    with torch.no_grad():
        assert not kernel.${operator}(x).requires_grad


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


def test_errors_name_the_argument():
    with pytest.raises(RuntimeError, match="x must be float32, float16 or bfloat16"):
        kernel.${operator}(torch.zeros(3, device=DEVICE, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"grad must have shape \[3\], not \[4\]"):
        kernel.op.ops.${operator}_backward(torch.zeros(4, device=DEVICE), torch.zeros(3, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    for x in (random(4, 5, dtype=dtype), random(5, 4, dtype=dtype).t()):
        torch.library.opcheck(kernel.op.ops.${operator}.default, (x,))
        torch.library.opcheck(kernel.op.ops.${operator}_backward.default, (torch.ones_like(x), x))


@pytest.mark.kernels_ci
def test_compile():
    def block(x):
        return kernel.${operator}(x * 2) + 1

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = random(rows, 8).requires_grad_()
        torch.testing.assert_close(compiled(x), block(x))
        grads = [torch.autograd.grad(function(x).sum(), x) for function in (compiled, block)]
        torch.testing.assert_close(*grads)


def test_layer():
    x = random(4, 5)
    replaced = ${replaced}
    torch.testing.assert_close(kernel.layers.${layer}.forward(replaced, x), replaced(x))
