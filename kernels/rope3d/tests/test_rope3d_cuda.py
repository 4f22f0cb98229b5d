"""Test streams, CUDA graphs, several devices and large tensors."""

import math

import pytest
import torch
from reference_rope3d import GRID, TOKENS, assert_as_good, kernel, wan_angles, wan_widths
from testing import DEVICE, capture, gpu, random


@gpu
@pytest.mark.parametrize("theta", [10000.0, 123.0])
def test_graph(theta):
    """A graph may also make its tables during the capture; other calls must not get these."""
    q, k = (random(1, TOKENS, 3, 64, dtype=torch.float16, requires_grad=True) for _ in range(2))

    def step(theta):
        out = kernel.rope3d(q, k, GRID, theta=theta)
        return torch.autograd.grad(out, (q, k), (k.detach(), q.detach()))

    graph, captured = capture(lambda: step(theta), lambda: step(10000.0))
    expected = step(theta)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected))
    with torch.no_grad():
        q.copy_(random(1, TOKENS, 3, 64, dtype=torch.float16))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(theta)))


@gpu
def test_more_elements_than_32_bits_count():
    heads, dim, grid = 64, 128, (64, 64, 65)
    tokens = math.prod(grid)
    if torch.cuda.mem_get_info()[0] < 2 * 2 * heads * dim * tokens + 2**30:
        pytest.skip("needs 9 GB of GPU memory")
    q = torch.ones(1, tokens, heads, dim, device=DEVICE, dtype=torch.bfloat16)
    q[0, -1] = random(heads, dim, dtype=torch.bfloat16)
    last = wan_angles([torch.tensor([size - 1.0], dtype=torch.float64) for size in grid], wan_widths(dim))
    cos, sin = (f(last).float().to(DEVICE).expand(tokens, -1) for f in (torch.cos, torch.sin))
    for pairs in ("interleaved", "half"):
        for rotate in (
            lambda pairs=pairs: kernel.rope3d(q, None, grid, pairs=pairs),
            lambda pairs=pairs: kernel.apply_rotary(q, None, cos, sin, pairs=pairs),
            lambda pairs=pairs: kernel.apply_rotary(q[:, :, :62], q[:, :, 62:], cos, sin, pairs=pairs)[::-1],
        ):
            out, _ = rotate()
            heads = out.shape[2]
            assert_as_good(out[:, -1:], q[:, -1:, -heads:], last, pairs == "half")
            del out
