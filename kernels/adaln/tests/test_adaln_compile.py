"""Test the ops with torch.library.opcheck and torch.compile."""

import pytest
import torch
from reference_adaln import DEVICE, DTYPES, EPS, MODULATIONS, kernel, leaves, modulations, ops, random


@pytest.mark.parametrize(
    ("dtype", "kind", "with_weights"), list(zip([*DTYPES, torch.float32], MODULATIONS, [True, False, True, False]))
)
def test_opcheck(dtype, kind, with_weights):
    x, branch = (random(3, 5, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    gate, scale, shift = leaves(*modulations(kind, 3, 5, 24, dtype, 3))
    weight, bias = (random(24, dtype=dtype, requires_grad=True) for _ in range(2))
    strided = random(3, 24, 5, dtype=dtype).transpose(1, 2)
    torch.library.opcheck(ops.gate_residual.default, (x, branch, gate, False))
    torch.library.opcheck(ops.gate_residual_backward.default, (strided, branch.detach(), gate.detach(), True))
    w, b = (weight, bias) if with_weights else (None, None)
    torch.library.opcheck(ops.ada_norm.default, (x, scale, shift, w, b, EPS, True, False))
    torch.library.opcheck(ops.ada_norm.default, (strided, None, None, w, b, EPS, False, True))
    for maybe_gate in (gate, None):
        arguments = (x, branch, maybe_gate, scale, shift, EPS, True, False, w, b)
        torch.library.opcheck(ops.gate_residual_ada_norm.default, arguments)
    given = [None if t is None else t.detach() for t in (strided, x, scale, w, b)]
    for more in ((), (x.detach(),), (x.detach(), branch.detach(), gate.detach(), True)):
        arguments = (*given, EPS, True, True, with_weights, *more)
        torch.library.opcheck(ops.ada_norm_backward.default, arguments)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("kind", ["[B, 1, C]", "[B, S, C]"])
def test_compile(kind):
    def block(x, branch, gate, scale, shift):
        total, normed = kernel.gate_residual_ada_norm(x * 2, branch, gate, scale, shift, norm="rms")
        total, normed = kernel.add_ada_norm(total, normed, scale, shift)
        return kernel.gate_residual(total, kernel.ada_layer_norm(normed, scale, shift), gate)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 9):
        with torch.compiler.set_stance("fail_on_recompile" if batch == 9 else "default"):
            inputs = [random(batch, 3, 48, dtype=torch.float32, requires_grad=True) for _ in range(2)]
            inputs += leaves(*modulations(kind, batch, 3, 48, torch.float32, 3))
            expected, actual = block(*inputs), compiled(*inputs)
            torch.testing.assert_close(actual, expected)
            grad = torch.randn_like(expected)
            torch.testing.assert_close(
                torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad)
            )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the CPU runs compile another backend")
def test_compile_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, s: kernel.ada_layer_norm(x + 1, s, s) * 2, fullgraph=True, dynamic=True)
    for batch in (4, 9):
        x, scale = random(batch, 7, 256, dtype=torch.bfloat16), random(batch, 1, 256, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x, scale), kernel.ada_layer_norm(x + 1, scale, scale) * 2)
