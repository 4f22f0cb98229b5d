"""Test fake tensors, torch.compile, CUDA graphs, and derivatives with respect to tables."""

import math

import pytest
import torch
from differentiate import assert_derivatives
from reference_norm_rotary import normed
from reference_rope3d import GRID, TOKENS, assert_as_good, kernel, rotated, wan_angles, wan_widths
from testing import DEVICE, capture, gpu, random
from torch._subclasses.fake_tensor import FakeTensorMode


def test_fake_tensors():
    """A call on a fake tensor does not get a kept table, and a later call does not get a fake one."""
    q = random(1, TOKENS, 2, 64, dtype=torch.float32)
    kernel.rope3d(q, None, GRID)
    with FakeTensorMode() as mode:
        out, _ = kernel.rope3d(mode.from_tensor(q), None, GRID)
    assert out.shape == q.shape and out.device == q.device
    with FakeTensorMode(allow_non_fake_inputs=True):
        out, _ = kernel.rope3d(q, None, GRID, theta=55.0)
    assert type(out) is not torch.Tensor
    assert type(kernel.rope3d(q, None, GRID, theta=55.0)[0]) is torch.Tensor


def test_compile_another_grid():
    def on(grid, q):
        return kernel.rope3d(q, None, grid)

    torch._dynamo.reset()
    compiled = torch.compile(on, fullgraph=True, dynamic=True, backend="eager")
    for grid in ((3, 4, 5), (6, 7, 8)):
        with torch.compiler.set_stance("fail_on_recompile" if grid[0] == 6 else "default"):
            q = random(2, math.prod(grid), 3, 32, dtype=torch.float32)
            torch.testing.assert_close(compiled(grid, q)[0], kernel.rope3d(q, None, grid)[0])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_tables_have_derivatives(with_norm, each, half):
    """Learned frequencies: the tables need gradients, and q may need none."""
    q, tables = random(2, 7, 3, 16, dtype=torch.float32), list(random(2, 7, 16 if each else 8, dtype=torch.float32))
    pairs = "half" if half else "interleaved"

    def function(cos, sin, q):
        if with_norm:
            return kernel.norm_rotary(q, None, None, None, cos, sin, pairs=pairs)
        return kernel.apply_rotary(q, None, cos, sin, pairs=pairs)

    def exact(cos, sin, q):
        parts = [tuple(t.chunk(2, -1)) if half else (t[..., ::2], t[..., 1::2]) for t in (cos, sin)]
        return rotated(normed(q, None) if with_norm else q, tuple(parts) if each else (cos, sin), half)

    assert_derivatives(function, exact, (*tables, q))
    leaves = [table.requires_grad_() for table in tables]
    weights = torch.randn_like(q)
    actual = torch.autograd.grad(function(*leaves, q)[0], leaves, weights)
    doubles = [table.detach().double().requires_grad_() for table in tables]
    expected = torch.autograd.grad(exact(*doubles, q.double()), doubles, weights.double())
    torch.testing.assert_close([grad.double() for grad in actual], list(expected), rtol=1e-5, atol=1e-5)


def test_no_table_is_kept_from_a_transform():
    q = random(1, TOKENS, 1, 14, dtype=torch.float32)
    kept = len(kernel.rotary._kept.entries)
    torch.func.grad(lambda q: kernel.rope3d(q, None, GRID)[0].sum())(q)
    assert len(kernel.rotary._kept.entries) == kept
    kernel.rope3d(q, None, GRID)
    assert len(kernel.rotary._kept.entries) == kept + 1


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
