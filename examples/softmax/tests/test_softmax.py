"""Compares the built kernel with Torch. The public client loads it from `build/`, as it does for users."""

from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# No elements, fewer than a block, whole blocks, a tail, and a row whose exponentials are computed twice.
SHAPES = [(), (0,), (1,), (64,), (3, 0, 5), (5, 1001), (7, 30, 128), (2, 9000)]

kernel = get_local_kernel(Path(__file__).resolve().parents[1], backend="cpu")


def eager(x):
    return torch.softmax(x, -1)


def assert_rounded(actual, expected):
    """Compare with a result in float64: within one unit in the last place, as after a single rounding."""
    assert actual.is_contiguous()
    rounding = max(torch.finfo(actual.dtype).eps, 2e-6)
    torch.testing.assert_close(actual.double(), expected, rtol=rounding, atol=1e-7)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape, dtype):
    x = 4 * torch.randn(shape, dtype=dtype)
    assert_rounded(kernel.softmax(x), eager(x.double()))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward(dtype):
    x, grad = torch.randn(5, 1001, dtype=dtype).requires_grad_(), torch.randn(5, 1001, dtype=dtype)
    y = kernel.softmax(x)
    (actual,) = torch.autograd.grad(y, x, grad)
    double = y.detach().double()
    assert_rounded(actual, double * (grad.double() - (double * grad.double()).sum(-1, keepdim=True)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_and_special_values(dtype):
    infinity, nan = float("inf"), float("nan")
    rows = [[1.0, -infinity, 2.0], [-infinity] * 3, [1.0, nan, 2.0], [1.0, infinity, 2.0], [-200.0, 100.0, 0.0]]
    x = torch.tensor(rows, dtype=dtype)
    torch.testing.assert_close(kernel.softmax(x), eager(x), equal_nan=True)
    assert kernel.softmax(x)[0, 1] == 0


def test_strides_and_errors():
    x = torch.randn(6, 8, 10).transpose(0, 2)[::2]
    assert torch.equal(kernel.softmax(x), kernel.softmax(x.contiguous()))
    with pytest.raises(RuntimeError, match="x must be float32, float16 or bfloat16"):
        kernel.softmax(torch.zeros(3, dtype=torch.int64))


def test_opcheck():
    x = torch.randn(5, 4)
    torch.library.opcheck(kernel.op.ops.softmax.default, (x.t(),))
    torch.library.opcheck(kernel.op.ops.softmax_backward.default, (torch.ones_like(x), x))


def test_derivatives():
    x, tangent = torch.randn(4, 5), torch.randn(4, 5)
    torch.testing.assert_close(
        torch.func.jvp(kernel.softmax, (x,), (tangent,)), torch.func.jvp(eager, (x,), (tangent,))
    )
    x.requires_grad_()
    (grad,) = torch.autograd.grad(kernel.softmax(x)[0, 0], x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second time"):
        grad.sum().backward()


def test_compile():
    compiled = torch.compile(kernel.softmax, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), eager(x))


def test_layer():
    x = torch.randn(4, 5, 6)
    for replaced in (torch.nn.Softmax(dim=-1), torch.nn.Softmax(dim=2), torch.nn.Softmax(dim=1)):
        torch.testing.assert_close(kernel.layers.Softmax.forward(replaced, x), replaced(x))
