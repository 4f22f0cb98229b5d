"""Test the ops with torch.library.opcheck and torch.compile."""

import pytest
import torch
from reference_geglu import ACTIVATIONS, kernel, ops, random
from testing import DEVICE, DTYPES, assert_compiles, assert_compiles_with_inductor


@pytest.mark.parametrize(("dtype", "activation"), list(zip(DTYPES, ACTIVATIONS.values())))
def test_opcheck(dtype, activation):
    x, y = (random(3, 5, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    strided = random(3, 24, 5, dtype=dtype).transpose(1, 2)
    grad = random(3, 5, 24, dtype=dtype)
    torch.library.opcheck(ops.geglu_halves.default, (x, activation, True))
    torch.library.opcheck(ops.geglu_halves.default, (strided, activation, False))
    torch.library.opcheck(ops.geglu_pair.default, (x, y, activation))
    torch.library.opcheck(ops.geglu_halves_backward.default, (grad[..., :12], x.detach(), activation, False))
    torch.library.opcheck(ops.geglu_pair_backward.default, (grad, x.detach(), y.detach(), activation))


@pytest.mark.kernels_ci
def test_compile():
    def block(x, up):
        gate = kernel.geglu(x * 2, approximate="tanh") + kernel.swiglu(x, gate="first")
        return kernel.geglu(gate, up) + kernel.swiglu(up, gate)

    assert_compiles(
        block, lambda batch: [random(batch, 3, n, dtype=torch.float32, requires_grad=True) for n in (96, 48)]
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the CPU runs compile another backend")
def test_compile_inductor():
    assert_compiles_with_inductor(
        lambda x: kernel.geglu(x + 1) * 2, lambda batch: [random(batch, 256, dtype=torch.bfloat16)]
    )
