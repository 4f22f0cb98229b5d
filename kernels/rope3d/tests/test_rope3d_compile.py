"""Test the ops with torch.library.opcheck and torch.compile."""

import math

import pytest
import torch
from reference_rope3d import GRID, TOKENS, kernel
from testing import DEVICE, random
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


@pytest.mark.parametrize("rotate", ["rope3d", "apply_rotary"])
def test_in_place_saves_and_versions(rotate):
    """In place and out of place have one gradient, and every way of writing q and k bumps their versions."""
    cos, sin = torch.rand(2, TOKENS, 16, device=DEVICE)
    arguments = (GRID,) if rotate == "rope3d" else (cos, sin)
    q, k = (random(1, TOKENS, 2, 16, dtype=torch.float32, requires_grad=True) for _ in range(2))
    grads = [torch.randn_like(q) for _ in range(2)]
    expected = torch.autograd.grad(getattr(kernel, rotate)(q, k, *arguments), (q, k), grads)

    def block(q, k):
        q, k = q * 1, k * 1
        return getattr(kernel, rotate)(q, k, *arguments, inplace=True)

    torch._dynamo.reset()
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(torch.autograd.grad(function(q, k), (q, k), grads), expected)
    changed = q * 1
    version = changed._version
    getattr(kernel, rotate)(changed, None, *arguments, inplace=True)
    assert changed._version > version
    with torch.no_grad():
        version = changed._version
        getattr(kernel, rotate)(changed, None, *arguments, inplace=True)
        assert changed._version > version


def test_compile_another_grid():
    def on(grid, q):
        return kernel.rope3d(q, None, grid)

    torch._dynamo.reset()
    compiled = torch.compile(on, fullgraph=True, dynamic=True, backend="eager")
    for grid in ((3, 4, 5), (6, 7, 8)):
        with torch.compiler.set_stance("fail_on_recompile" if grid[0] == 6 else "default"):
            q = random(2, math.prod(grid), 3, 32, dtype=torch.float32)
            torch.testing.assert_close(compiled(grid, q)[0], kernel.rope3d(q, None, grid)[0])
