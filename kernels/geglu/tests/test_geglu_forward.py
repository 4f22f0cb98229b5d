"""Compare results and gradients with float64."""

import pytest
import torch
from reference_geglu import ACTIVATIONS, GATES, HIDDEN, eager, kernel, of_halves, of_pair, ops, random, split
from testing import (
    DEVICE,
    DTYPES,
    assert_accurate,
    copies,
    doubles,
    gpu,
    results_and_gradients,
    units_apart,
    views,
)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, h) for h in HIDDEN] + [(1, 64), (700, 64), (2, 150, 136), (333, 65)])
def test_accuracy(shape, dtype, activation):
    """Of results and gradients. Halves of one tensor give the bits of two tensors."""
    x = random(*shape[:-1], 2 * shape[-1], dtype=dtype, requires_grad=True)
    grad = random(*shape, dtype=dtype)
    for gate in GATES:
        formula, ours = (
            lambda x, gate=gate: eager(*split(x, gate), activation),
            lambda x, gate=gate: of_halves(x, activation, gate),
        )
        assert_accurate(ours, formula, formula, [x], [grad])
        (out,), (of_x,) = results_and_gradients(ours, [x], [grad])
        assert out.is_contiguous()
        halves = [half.detach().requires_grad_() for half in split(x, gate)]
        for pair in (halves, [half.detach().contiguous().requires_grad_() for half in halves]):
            (same,), grads = results_and_gradients(lambda g, u: of_pair(g, u, activation), pair, [grad])
            assert torch.equal(same, out) and all(map(torch.equal, grads, split(of_x, gate)))


def test_up_as_an_argument():
    gate, up = random(5, 64, dtype=torch.float32), random(5, 64, dtype=torch.float32)
    for activation in ("none", "tanh"):
        out = kernel.geglu(gate, up, approximate=activation)
        assert torch.equal(out, kernel.geglu_pair(gate, up, activation))
    assert torch.equal(kernel.swiglu(gate, up), kernel.swiglu_pair(gate, up))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_over_many_elements(dtype, activation):
    """Compare the mean error, which reveals an error of the last bits.

    The gates include many of 1 or -1, for which PyTorch's own errors happen to be small.
    """
    for scale, most in ((0.3, 9), (1.0, 9), (1.0, 1), (4.0, 99)):
        gate, up, grad = (
            torch.randn(500, 1000, device=DEVICE).mul(scale).clamp(-most, most).to(dtype) for _ in range(3)
        )
        gate.requires_grad_()
        up.requires_grad_()
        calls = (eager, doubles((gate, up))), (of_pair, (gate, up)), (eager, (gate, up))
        expected, ours, theirs = (
            sum(results_and_gradients(lambda g, u, f=f: f(g, u, activation), inputs, [grad]), ()) for f, inputs in calls
        )
        for mine, other, e in zip(ours, theirs, expected):
            assert (mine.double() - e).norm() <= 1.1 * (other.double() - e).norm()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_unit_from_the_models_code(dtype, activation):
    """Models round the activation before the product: a difference of less than a unit. Below -3 gelu loses digits."""
    gate, up = random(1000, 1000, dtype=dtype).clamp(min=-3), random(1000, 1000, dtype=dtype)
    gate = torch.where(gate.abs() < 1e-2, 1.0, gate)  # no subnormal float16 results, whose units are not relative
    up = torch.where(up.abs() < 1e-2, 1.0, up)
    assert units_apart(of_pair(gate, up, activation), eager(gate, up, activation)).max() <= 1


@pytest.mark.parametrize(
    ("activation", "below", "above"), [("gelu", -15, 10), ("gelu_tanh", -15, 10), ("silu", -110, 25)]
)
def test_tails(activation, below, above):
    """Every bfloat16 as a gate: the result and the slope approach their limits and stay there."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(DEVICE)
    gate = gate[gate.isfinite()]
    up = torch.ones_like(gate)
    expected = eager(gate.double(), up.double(), activation)
    for dtype in (torch.bfloat16, torch.float32):
        g = gate.to(dtype).requires_grad_()
        out = of_pair(g, up.to(dtype), activation)
        (slope,) = torch.autograd.grad(out.sum(), g)
        torch.testing.assert_close(out.double(), expected, rtol=4e-3 if dtype == torch.bfloat16 else 2e-6, atol=1e-6)
        assert torch.equal(out.signbit(), gate.signbit())
        assert torch.equal(slope[gate > above], torch.ones_like(slope[gate > above]))
        assert torch.equal(slope[gate < below], torch.zeros_like(slope[gate < below]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_subnormal(activation):
    gate = torch.full((40,), 1.0, device=DEVICE, dtype=torch.float32)
    up = torch.linspace(-1e-38, 1e-38, 40, device=DEVICE)
    expected = eager(gate.double(), up.double(), activation)
    torch.testing.assert_close(of_pair(gate, up, activation).double(), expected, rtol=0, atol=2e-45)
    tiny = torch.full((40,), 1e-40, device=DEVICE)
    torch.testing.assert_close(of_pair(tiny, gate, activation), tiny / 2, rtol=0, atol=2e-45)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [34, 64])
def test_strides(width, dtype):
    for name, x in views(width, dtype).items():
        out = kernel.geglu(x)
        assert torch.equal(out, kernel.geglu(x.contiguous())), name
        grad = random(*out.shape[::-1], dtype=dtype).permute(*reversed(range(out.dim())))
        grad_x = ops.geglu_halves_backward(grad, x, 0, False)
        assert torch.equal(grad_x, ops.geglu_halves_backward(grad.contiguous(), x.contiguous(), 0, False)), name
        up = random(*x.shape[::-1], dtype=dtype).permute(*reversed(range(x.dim())))
        for gate, other in ((x, up), (up, x)):
            same = [t.contiguous() for t in (gate, other)]
            assert torch.equal(kernel.geglu_pair(gate, other), kernel.geglu_pair(*same)), name
            grads = ops.geglu_pair_backward(up, gate, other, 2)
            for a, b in zip(grads, ops.geglu_pair_backward(up.contiguous(), *same, 2)):
                assert torch.equal(a, b), name


def test_rows_are_read_in_place():
    storage = random(64, 3, 256, dtype=torch.float32)
    assert not copies(lambda: kernel.geglu(storage[:, :, :128]))
    assert not copies(lambda: kernel.geglu_pair(*storage.chunk(2, -1)))


@gpu
def test_more_elements_than_32_bits_count():
    rows, hidden = 2**19 + 3, 4096
    if torch.cuda.mem_get_info()[0] < 5 * 2 * hidden * rows:
        pytest.skip("needs 22 GB of GPU memory")
    gate = torch.zeros(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    gate[-1] = torch.arange(hidden, device=DEVICE) % 7 - 3
    last = eager(gate[-1], gate[-1])
    # As rows, as one row, as one unaligned row, and as rows of one element.
    for shape in ((rows, hidden), (-1,), (-1, 1)):
        out = kernel.geglu_pair(gate.view(shape), gate.view(shape)).view(-1)
        torch.testing.assert_close(out[-hidden:], last)
        assert not out[:-hidden].any()
        del out
    flat = gate.view(-1)
    out = kernel.geglu_pair(flat[1:], flat[1:])
    torch.testing.assert_close(out[-hidden:], last)
    assert not out[:-hidden].any()
    del out
    out = kernel.geglu(gate)
    torch.testing.assert_close(out[-1], eager(*split(gate[-1], "second")))
    assert not out[:-1].any()
