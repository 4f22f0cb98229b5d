"""Compare gradients with float64."""

import pytest
import torch
from reference_adaln import (
    EPS,
    HIDDEN,
    MODULATIONS,
    ada_norm,
    eager,
    eager_gated,
    exact,
    exact_gated,
    fused,
    kernel,
    leaves,
    modulations,
)
from testing import DTYPES, assert_accurate, random, views


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_backward(hidden, dtype):
    for layer in (True, False):
        for kind in MODULATIONS:
            for modulation_dtype in {dtype, torch.float32}:
                x, grad = random(2, 5, hidden, dtype=dtype, requires_grad=True), random(2, 5, hidden, dtype=dtype)
                scale, shift = leaves(*modulations(kind, 2, 5, hidden, modulation_dtype))
                weight = random(hidden, dtype=dtype, requires_grad=True)
                bias = random(hidden, dtype=torch.float32, requires_grad=True) if layer else None
                functions = [lambda *a, f=f, layer=layer: f(*a, EPS, layer) for f in (ada_norm, eager, exact)]
                assert_accurate(*functions, [x, scale, shift, None, None], [grad], results=False)
                assert_accurate(*functions, [x, scale, shift, weight, bias], [grad], results=False)
        assert_accurate(*functions, [x, None, None, weight, bias], [grad], results=False)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("has_gate", [True, False])
def test_backward_of_sums(has_gate, hidden, dtype):
    def exact_rounded(residual, branch, gate):
        total = exact_gated(residual, branch, gate)
        # The forward pass rounds the sum; its gradient is that of the rounded value.
        return total + (total.to(dtype).double() - total).detach()

    residual, branch = (random(2, 5, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    grads = [random(2, 5, hidden, dtype=dtype) for _ in range(2)]
    weight, bias = (random(hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    for norm in ("layer", "rms"):

        def ours(residual, branch, gate, *arguments, norm=norm):
            if has_gate:
                return kernel.gate_residual_ada_norm(residual, branch, gate, *arguments, EPS, norm)
            return kernel.add_ada_norm(residual, branch, *arguments, EPS, norm)

        references = fused(eager, eager_gated, norm), fused(exact, exact_rounded, norm)
        for kind in MODULATIONS:
            for modulation_dtype in {dtype} if has_gate else {dtype, torch.float32}:
                gate, scale, shift = leaves(*modulations(kind, 2, 5, hidden, modulation_dtype, 3))
                given = [residual, branch, gate if has_gate else None]
                for affine in ([None, None], [weight, bias]):
                    assert_accurate(ours, *references, [*given, scale, shift, *affine], grads, results=False)
            assert_accurate(ours, *references, [*given, None, None, weight, bias], grads, results=False)
            if has_gate and norm == "layer":
                assert_accurate(kernel.gate_residual, eager_gated, exact_gated, given, grads[:1], results=False)
        assert_accurate(ours, *references, [*given, None, None, None, None], grads, results=False)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", MODULATIONS)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 64), (1, 1, 1001), (1, 1, 3072), (1, 9000, 8), (1, 700, 64), (2, 900, 65), (3, 301, 136), (2, 150, 1000)],
)
def test_backward_of_one_and_of_many_rows(shape, kind):
    x, branch, grad = (random(*shape, dtype=torch.float32, requires_grad=True) for _ in range(3))
    gate, scale, shift = leaves(*modulations(kind, *shape, torch.float32, 3))
    weight, bias = (random(shape[-1], dtype=torch.float32, requires_grad=True) for _ in range(2))
    references = [fused(f, g, "layer") for f, g in ((eager, eager_gated), (exact, exact_gated))]
    inputs = [x, branch, gate, scale, shift, weight, bias]
    assert_accurate(kernel.gate_residual_ada_norm, *references, inputs, [grad, x.detach()], results=False)
    inputs[2] = None
    assert_accurate(kernel.gate_residual_ada_norm, *references, inputs, [grad, x.detach()], results=False)


@pytest.mark.parametrize("hidden", [64, 1001])
def test_backward_of_strides(hidden):
    scale, shift = random(2, hidden, dtype=torch.bfloat16)
    for name, x in views(hidden, torch.bfloat16).items():
        for grad in (x, random(*x.shape, dtype=torch.bfloat16)):
            actual, expected = (
                torch.autograd.grad(kernel.ada_layer_norm(*inputs, shift), inputs, grad)
                for inputs in (leaves(x, scale), leaves(x.contiguous(), scale))
            )
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=5e-2, msg=name)
