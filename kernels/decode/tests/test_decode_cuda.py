"""Test streams, CUDA graphs, several devices and large tensors."""

import pytest
import torch
import torch.nn.functional as F
from reference_decode import eager_linear, kernel
from test_decode_compile import step, step_inputs
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


# Tiles of 16 outputs per SM: for each way of `choose` in linear.cu, with blocks that share a tile and without.
TILES = [0.25, 0.5, 1.1, 1.4, 2, 2.4, 3, 4, 6]


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
