"""Test the ops with torch.library.opcheck and torch.compile."""

import math

import pytest
import torch
from reference_rope3d import GRID, TOKENS, kernel, ops
from testing import DEVICE, DTYPES, random
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    inverse = dtype == torch.float16
    q, k = random(2, TOKENS + 1, 3, 16, dtype=dtype), random(2, TOKENS + 1, 16, 1, dtype=dtype).transpose(2, 3)
    form = (1, 0, False, False, inverse)
    cos, sin = torch.rand(2, 2, TOKENS, 16, device=DEVICE)
    cases = {
        "rotate_grid": (torch.rand(12, 8, 2, device=DEVICE), *GRID, 4, 2, 2, *form[:2], False, *form[2:]),
        "rotate_tokens": (cos, sin, 0, *form),
    }
    # Whether there is a k, and a gradient, does not depend on the dtype: all of it in float32.
    optional = dtype == torch.float32
    for name, rest in cases.items():
        for grad in (False, True) if optional else (True,):
            for other in (None, k.detach()) if optional else (k.detach(),):
                leaves = (None if t is None else t.detach().requires_grad_(grad) for t in (q, other))
                torch.library.opcheck(getattr(ops, name).default, (*leaves, *rest))
        for other in (None, k.contiguous()) if optional else (k.contiguous(),):
            torch.library.opcheck(getattr(ops, name + "_").default, (q.clone(), other, *rest))


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


@pytest.mark.kernels_ci
def test_compile():
    def block(q, k, grid):
        q, k = kernel.rope3d(q * 2, k, grid, prefix=2)
        return kernel.apply_rotary(q, k, cos, sin, pairs="half")

    cos, sin = torch.rand(2, 2 + 4 * 60, 32, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 9):
        with torch.compiler.set_stance("fail_on_recompile" if batch == 9 else "default"):
            q, k = (random(batch, 242, heads, 32, dtype=torch.float32, requires_grad=True) for heads in (3, 2))
            expected, actual = block(q, k, (12, 4, 5)), compiled(q, k, (12, 4, 5))
            torch.testing.assert_close(actual, expected)
            grads = [torch.randn_like(e) for e in expected]
            torch.testing.assert_close(
                torch.autograd.grad(actual, (q, k), grads), torch.autograd.grad(expected, (q, k), grads)
            )


def test_compile_another_grid():
    def on(grid, q):
        return kernel.rope3d(q, None, grid)

    torch._dynamo.reset()
    compiled = torch.compile(on, fullgraph=True, dynamic=True, backend="eager")
    for grid in ((3, 4, 5), (6, 7, 8)):
        with torch.compiler.set_stance("fail_on_recompile" if grid[0] == 6 else "default"):
            q = random(2, math.prod(grid), 3, 32, dtype=torch.float32)
            torch.testing.assert_close(compiled(grid, q)[0], kernel.rope3d(q, None, grid)[0])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the CPU runs compile another backend")
def test_compile_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: kernel.rope3d(q + 1, q, GRID), fullgraph=True, dynamic=True)
    for batch in (4, 9):
        q = random(batch, TOKENS, 3, 128, dtype=torch.bfloat16)
        for actual, expected in zip(compiled(q), kernel.rope3d(q + 1, q, GRID)):
            torch.testing.assert_close(actual, expected)
