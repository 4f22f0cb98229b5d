"""Test the ops with torch.library.opcheck and torch.compile."""

import pytest
import torch
from reference_adaln import EPS, MODULATIONS, kernel, leaves, modulations, ops
from testing import DEVICE, DTYPES, assert_compiles, assert_compiles_with_inductor, random


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

    def inputs_of(batch):
        inputs = [random(batch, 3, 48, dtype=torch.float32, requires_grad=True) for _ in range(2)]
        return [*inputs, *leaves(*modulations(kind, batch, 3, 48, torch.float32, 3))]

    assert_compiles(block, inputs_of)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the CPU runs compile another backend")
def test_compile_inductor():
    assert_compiles_with_inductor(
        lambda x, scale: kernel.ada_layer_norm(x + 1, scale, scale) * 2,
        lambda batch: [random(batch, tokens, 256, dtype=torch.bfloat16) for tokens in (7, 1)],
    )
