"""Test a decoding step: fakes, torch.compile, CUDA graphs, streams, devices and large tensors."""

import pytest
import torch
import torch.nn.functional as F
from reference_decode import ACTIVATIONS, eager_linear, eager_norm, kernel, ops
from testing import (
    DEVICE,
    assert_as_good,
    assert_runs_on_second_device,
    assert_waits_for_stream,
    capture,
    doubles,
    gpu,
    random,
    two_gpus,
)


def test_opcheck():
    dtype = torch.bfloat16
    x, weight, bias, residual = (random(*shape, dtype=dtype) for shape in ((2, 3, 24), (10, 24), (10,), (2, 3, 10)))
    check = torch.library.opcheck
    check(ops.linear.default, (x, weight))
    check(ops.linear.default, (x, weight, bias, residual))
    check(ops.linear.default, (x, weight, None, None, weight[:3], bias[:3], weight[:, :24]))
    if DEVICE == "cuda":
        check(ops.linear.default, (x, weight, *[None] * 6, True, weight[0], 1e-6, 1.0))
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


@pytest.mark.usefixtures("two_threads")
def test_repeatable():
    """Bits do not depend on the run, on the threads, or on other results of the same call."""
    x, weight = random(5, 1024, dtype=torch.bfloat16), random(700, 1024, dtype=torch.bfloat16)
    tensors = [random(2, *sizes, 128, dtype=torch.bfloat16) for sizes in ((16, 1), (4, 700), (4, 700))]
    for call in (lambda: kernel.linear(x, weight), lambda: kernel.attention(*tensors)):
        outs = []
        for threads in (2, 2, 2, 2, 1):
            torch.set_num_threads(threads)
            outs.append(call())
        assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.equal(kernel.linears(x, [weight[:100], weight])[1], kernel.linear(x, weight))


@gpu
def test_stream():
    x, weight = random(1, 8192, dtype=torch.bfloat16), random(4096, 8192, dtype=torch.bfloat16)
    assert_waits_for_stream(lambda late: kernel.linear(late, weight), x)


@two_gpus
def test_second_device():
    x, weight = random(3, 256, dtype=torch.float16), random(100, 256, dtype=torch.float16)
    assert_runs_on_second_device(kernel.linear, x, weight)
    query, key = random(2, 8, 1, 64, dtype=torch.float16), random(2, 2, 300, 64, dtype=torch.float16)
    assert_runs_on_second_device(kernel.attention, query, key, key)


@gpu
@torch.no_grad()
def test_graph():
    """A replay reads the position and the token that are there then."""
    x, weights, key, value, position = step_inputs(4, 300, torch.bfloat16)
    graph, captured = capture(lambda: step(x, weights, key, value, position))
    for at in (10, 299):
        x.copy_(random(4, 1, 64, dtype=torch.bfloat16))
        position.fill_(at)
        caches = key.clone(), value.clone()
        expected = step(x, weights, *caches, position)
        graph.replay()
        assert torch.equal(captured, expected)
        assert torch.equal(key, caches[0]) and torch.equal(value, caches[1])


# Tiles of 16 outputs per SM: for each way of `choose` in linear_plans.cuh, with blocks that share a tile and without.
TILES = [0.25, 0.5, 0.6, 1.1, 1.4, 2, 2.4, 3, 4, 6]


@gpu
@pytest.mark.parametrize("inputs", [1000, 4096, 8200, 14336])
@pytest.mark.parametrize("tiles", TILES)
def test_ways_to_read_the_weights(tiles, inputs):
    outputs = int(torch.cuda.get_device_properties(0).multi_processor_count * tiles) * 16 - 1
    weight = random(outputs, inputs, dtype=torch.bfloat16)
    for rows in (1, 8):
        x = random(rows, inputs, dtype=torch.bfloat16)
        out = kernel.linear(x, weight)
        assert_as_good(out, eager_linear(x, weight), eager_linear(*doubles([x, weight])))
        assert torch.equal(out, kernel.linear(x, weight))
        norm = random(inputs, dtype=torch.bfloat16)
        if x.numel() <= 18432:
            out = kernel.linear(x, weight, norm=(norm, 1e-6, 0.0))
            reference, expected = (
                eager_linear(eager_norm(y, n, 1e-6), w) for y, n, w in ((x, norm, weight), doubles([x, norm, weight]))
            )
            assert_as_good(out, reference, expected, factor=1.5)
        gate, up = weight[: outputs // 2], weight[-(outputs // 2) :]
        reference, expected = (
            F.silu(F.linear(y, g)) * F.linear(y, u) for y, g, u in ((x, gate, up), doubles([x, gate, up]))
        )
        assert_as_good(kernel.gated_linear(x, gate, up), reference, expected)


@gpu
def test_more_elements_than_32_bits_count():
    outputs, inputs = 2**19 + 3, 4096 + 8
    if torch.cuda.mem_get_info()[0] < 3 * outputs * inputs:
        pytest.skip("needs 6 GB of GPU memory")
    weight = torch.zeros(outputs, inputs, device=DEVICE, dtype=torch.bfloat16)
    weight[-1] = 1
    x = random(1, inputs, dtype=torch.bfloat16)
    out = kernel.linear(x, weight)
    torch.testing.assert_close(out[0, -1].float(), x.float().sum(), rtol=1e-2, atol=1e-1)
    assert not out[0, :-1].any()
