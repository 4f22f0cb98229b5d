"""Test fake tensors and torch.compile."""

import math

import torch
from reference_rope3d import GRID, TOKENS, kernel
from testing import random
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
