"""Test the ops with torch.library.opcheck and torch.compile."""

import pytest
import torch
from reference_rmsnorm import EPS, kernel, ops
from testing import DEVICE, DTYPES, assert_compiles, assert_compiles_with_inductor, random


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "offset", "before"),
    list(zip(DTYPES, (None, torch.float32, DTYPES[2]), (0.0, 1.0, 0.0), (False, True, True))),
)
def test_opcheck(dtype, weight_dtype, offset, before):
    x, y = (random(3, 5, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    w = None if weight_dtype is None else random(24, dtype=weight_dtype, requires_grad=weight_dtype == dtype)
    strided = random(3, 24, 5, dtype=dtype).transpose(1, 2)
    torch.library.opcheck(ops.rms_norm.default, (x, w, EPS, offset, before))
    torch.library.opcheck(ops.rms_norm.default, (strided, w, EPS, offset, before))
    torch.library.opcheck(ops.add_rms_norm.default, (x, y, w, EPS, offset, before))
    for grad_sum in (None, y.detach()):
        arguments = (x.detach(), y.detach(), w if w is None else w.detach(), grad_sum, w is not None, EPS, offset)
        torch.library.opcheck(ops.rms_norm_backward.default, arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_in_place(dtype):
    weight = random(24, dtype=dtype)
    for w, before in ((None, False), (weight, True)):
        x, residual = random(3, 5, 24, dtype=dtype), random(5, 3, 24, dtype=dtype).transpose(0, 1)
        torch.library.opcheck(ops.add_rms_norm_.default, (x, residual, w, EPS, 0.0, before))


@pytest.mark.kernels_ci
def test_compile():
    def block(x, residual, weight):
        normed, total = kernel.add_rms_norm(x * 2, residual, weight)
        return kernel.rms_norm(normed, weight) + total

    weight = random(48, dtype=torch.float32, requires_grad=True)
    assert_compiles(
        block,
        lambda batch: [*(random(batch, 3, 48, dtype=torch.float32, requires_grad=True) for _ in range(2)), weight],
    )


@pytest.mark.kernels_ci
def test_compile_in_place():
    def block(x, residual, weight):
        x, residual = x * 2, residual * 3
        kernel.add_rms_norm_(x, residual, weight, EPS)
        kernel.add_rms_norm_(x, residual, None, EPS)
        return x, residual

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = random(48, dtype=torch.float32)
    for batch in (4, 9):
        with torch.compiler.set_stance("fail_on_recompile" if batch == 9 else "default"):
            x, residual = (random(batch, 3, 48, dtype=torch.float32) for _ in range(2))
            torch.testing.assert_close(compiled(x, residual, weight), block(x, residual, weight))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the CPU runs compile another backend")
def test_compile_inductor():
    weight = random(256, dtype=torch.bfloat16)
    assert_compiles_with_inductor(
        lambda x: kernel.rms_norm(x + 1, weight) * 2, lambda batch: [random(batch, 256, dtype=torch.bfloat16)]
    )
