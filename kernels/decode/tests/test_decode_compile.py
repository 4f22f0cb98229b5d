"""Test the ops with torch.library.opcheck and torch.compile."""

import pytest
import torch
from reference_decode import ACTIVATIONS, kernel, ops
from testing import DEVICE, random


def test_opcheck():
    dtype = torch.bfloat16
    x, weight, bias, residual = (random(*shape, dtype=dtype) for shape in ((2, 3, 24), (10, 24), (10,), (2, 3, 10)))
    check = torch.library.opcheck
    check(ops.linear.default, (x, weight))
    check(ops.linear.default, (x, weight, bias, residual))
    check(ops.linear.default, (x, weight, None, None, weight[:3], bias[:3], weight[:, :24]))
    for activation in ACTIVATIONS.values():
        check(ops.gated_linear.default, (x, weight, weight, activation, bias))
    query, key, value = (random(*shape, dtype=dtype) for shape in ((2, 4, 1, 16), (2, 2, 9, 16), (2, 2, 9, 16)))
    new = random(2, 2, 1, 16, dtype=dtype)
    mask, position = torch.rand(2, 1, 1, 9, device=DEVICE) < 0.5, torch.tensor(3, device=DEVICE)
    check(ops.attention.default, (query, key, value, None, 0.25))
    check(ops.attention.default, (query, key, value, mask, 0.25))
    check(ops.cached_attention.default, (query, new, new, key, value, position, mask, 0.25))


def step(x, weights, key, value, position):
    q, k, v = kernel.linears(x, weights[:3])
    q, k, v = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in (q, k, v))
    mask = torch.arange(key.shape[2], device=DEVICE)[None, None, None] <= position
    out = kernel.attention(q, key, value, mask=mask, new_key=k, new_value=v, position=position)
    x = kernel.linear(out.flatten(2), weights[3], residual=x)
    return x + kernel.gated_linear(x, weights[0], weights[0], activation="gelu_tanh")


def step_inputs(batch, tokens, dtype):
    weights = [random(outputs, 64, dtype=dtype) / 8 for outputs in (64, 32, 32, 64)]
    caches = [random(batch, 2, tokens, 16, dtype=dtype) for _ in range(2)]
    return random(batch, 1, 64, dtype=dtype), weights, *caches, torch.tensor(3, device=DEVICE)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("grad_mode", [True, False])
def test_compile(grad_mode):
    torch._dynamo.reset()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    with torch.set_grad_enabled(grad_mode):
        for batch, tokens in ((4, 20), (7, 31)):
            with torch.compiler.set_stance("fail_on_recompile" if batch == 7 else "default"):
                x, weights, key, value, position = step_inputs(batch, tokens, torch.float16)
                caches = key.clone(), value.clone()
                expected = step(x, weights, key, value, position)
                actual = compiled(x, weights, *caches, position)
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(caches, (key, value))
