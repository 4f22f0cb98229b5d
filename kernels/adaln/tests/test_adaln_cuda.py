"""Test streams, CUDA graphs, several devices and large tensors."""

import pytest
import torch
from reference_adaln import EPS, ada_norm, eager, eager_gated, exact, exact_gated, fused, kernel, leaves, modulations
from testing import (
    DEVICE,
    assert_accurate,
    assert_as_good,
    gpu,
    random,
)


@gpu
@pytest.mark.parametrize("hidden", [1152, 2048, 3072])
def test_large(hidden):
    x, branch = (random(2, 4096, hidden, dtype=torch.bfloat16) for _ in range(2))
    gate, scale, shift = modulations("[B, 1, C]", 2, 4096, hidden, torch.bfloat16, 3)
    total, normed = kernel.gate_residual_ada_norm(x, branch, gate, scale, shift)
    assert torch.equal(total, eager_gated(x, branch, gate))
    torch.testing.assert_close(normed, eager(total, scale, shift), rtol=8e-3, atol=1e-5)
    torch.testing.assert_close(kernel.ada_layer_norm(total, scale, shift), normed, rtol=8e-3, atol=1e-5)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(2, 40, 2048), (2, 700, 1024), (1, 1400, 1536), (2, 1024, 2048), (1, 6700, 2048), (2, 4500, 1152)]
)
def test_backward_of_more_and_more_to_read(shape, dtype):
    """Widths for which a block takes different numbers of rows at a time and loads different numbers ahead."""
    x, branch, grad, grad_sum = (random(*shape, dtype=dtype) for _ in range(4))
    for modulation_dtype in {dtype, torch.float32}:
        gate, scale, shift = leaves(*modulations("[B, C]", *shape, modulation_dtype, 3))
        weight = random(shape[-1], dtype=modulation_dtype, requires_grad=True)
        functions = [lambda *a, f=f: f(*a, None, EPS, False) for f in (ada_norm, eager, exact)]
        assert_accurate(*functions, [*leaves(x), scale, shift, weight], [grad], results=False)
        references = (fused(f, g, "layer") for f, g in ((eager, eager_gated), (exact, exact_gated)))
        inputs = [*leaves(x, branch), gate, scale, shift, weight]
        assert_accurate(kernel.gate_residual_ada_norm, *references, inputs, [grad_sum, grad], results=False)


@gpu
def test_more_elements_than_32_bits_count():
    hidden, rows = 4096, 2**19 + 3
    if torch.cuda.mem_get_info()[0] < 4 * 2 * hidden * rows:
        pytest.skip("needs 17 GB of GPU memory")
    x = torch.zeros(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    x[-1] = torch.arange(hidden, device=DEVICE) % 7
    scale, shift = random(2, hidden, dtype=torch.bfloat16)
    normed = kernel.ada_layer_norm(x, scale, shift)
    assert torch.equal(normed[0], shift)
    assert_as_good(normed[-1], eager(x[-1], scale, shift), exact(x[-1], scale, shift))
    assert torch.equal(kernel.gate_residual(x, x, scale)[-1], eager_gated(x[-1], x[-1], scale))
