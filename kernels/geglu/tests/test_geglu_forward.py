"""Compare results with float64."""

import pytest
import torch
from reference_geglu import (
    APPROXIMATE,
    DEVICE,
    DTYPES,
    GATES,
    HIDDEN,
    assert_as_good,
    doubles,
    eager,
    gradients,
    kernel,
    ops,
    random,
    split,
    units_apart,
)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_forward(hidden, dtype, approximate):
    x = random(5, 2 * hidden, dtype=dtype)
    for gate in GATES:
        halves = split(x, gate)
        out = kernel.geglu(x, approximate=approximate, gate=gate)
        assert out.is_contiguous()
        assert_as_good(out, eager(*halves, approximate), eager(*doubles(halves), approximate))
        assert torch.equal(kernel.geglu_pair(*halves, approximate), out)
        assert torch.equal(kernel.geglu(*halves, approximate=approximate), out)
        assert torch.equal(kernel.geglu_pair(*(half.contiguous() for half in halves), approximate), out)


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_over_many_elements(dtype, approximate):
    """Compare the mean error, which reveals an error of the last bits.

    The gates include many of 1 or -1, for which PyTorch's own errors happen to be small.
    """
    for scale, most in ((0.3, 9), (1.0, 9), (1.0, 1), (4.0, 99)):
        gate, up, grad = (
            torch.randn(1000, 1000, device=DEVICE).mul(scale).clamp(-most, most).to(dtype) for _ in range(3)
        )
        gate.requires_grad_()
        up.requires_grad_()
        inputs = doubles((gate, up))
        expected = [eager(*inputs, approximate), *gradients(lambda g, u: eager(g, u, approximate), inputs, grad)]
        ours, theirs = (
            [f(gate, up, approximate), *gradients(lambda g, u, f=f: f(g, u, approximate), (gate, up), grad)]
            for f in (kernel.geglu_pair, eager)
        )
        for mine, other, e in zip(ours, theirs, expected):
            assert (mine.double() - e).norm() <= 1.1 * (other.double() - e).norm()


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_unit_from_the_models_code(dtype, approximate):
    """Models round gelu before the product, which changes a result by less than a unit; below -3 they lose digits."""
    gate, up = random(1000, 1000, dtype=dtype).clamp(min=-3), random(1000, 1000, dtype=dtype)
    gate = torch.where(gate.abs() < 1e-2, 1.0, gate)  # no subnormal float16 results, whose units are not relative
    up = torch.where(up.abs() < 1e-2, 1.0, up)
    assert units_apart(kernel.geglu_pair(gate, up, approximate), eager(gate, up, approximate)).max() <= 1


@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_tails(approximate):
    """Every bfloat16 as a gate: the result and the slope approach their limits and stay there."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(DEVICE)
    gate = gate[gate.isfinite()]
    up = torch.ones_like(gate)
    expected = eager(gate.double(), up.double(), approximate)
    for dtype in (torch.bfloat16, torch.float32):
        g = gate.to(dtype).requires_grad_()
        out = kernel.geglu_pair(g, up.to(dtype), approximate)
        (slope,) = torch.autograd.grad(out.sum(), g)
        torch.testing.assert_close(out.double(), expected, rtol=4e-3 if dtype == torch.bfloat16 else 2e-6, atol=1e-6)
        assert torch.equal(out.signbit(), gate.signbit())
        assert torch.equal(slope[gate > 10], torch.ones_like(slope[gate > 10]))
        assert torch.equal(slope[gate < -15], torch.zeros_like(slope[gate < -15]))


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [17, 64])
def test_not_finite(hidden, dtype, approximate):
    inf, nan = float("inf"), float("nan")
    gate, up = random(3, hidden, dtype=dtype), random(3, hidden, dtype=dtype)
    gate[1, 3:6] = torch.tensor([nan, inf, -inf])
    up[2, 3:6] = torch.tensor([nan, inf, -inf])
    wide = gate.double()
    share = (
        torch.special.ndtr(wide) if approximate == "none" else torch.sigmoid(1.5957691 * (wide + 0.044715 * wide**3))
    )
    expected = (up.double() * (wide * share)).to(dtype)
    out = kernel.geglu_pair(gate, up, approximate)
    assert torch.allclose(out, expected, rtol=1e-2, atol=1e-2, equal_nan=True)
    assert torch.equal(
        kernel.geglu(torch.cat([up, gate], -1), approximate=approximate).nan_to_num(7), out.nan_to_num(7)
    )


def test_subnormal():
    gate = torch.full((40,), 1.0, device=DEVICE, dtype=torch.float32)
    up = torch.linspace(-1e-38, 1e-38, 40, device=DEVICE)
    torch.testing.assert_close(
        kernel.geglu_pair(gate, up).double(), eager(gate.double(), up.double()), rtol=0, atol=2e-45
    )
    tiny = torch.full((40,), 1e-40, device=DEVICE)
    torch.testing.assert_close(kernel.geglu_pair(tiny, gate), tiny / 2, rtol=0, atol=2e-45)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3000, 64), (2, 3, 5, 7, 96), (1025, 2), (300, 200), (1001, 130)])
def test_shapes(shape):
    x = random(*shape, dtype=torch.float16)
    assert_as_good(kernel.geglu(x), eager(*split(x, "second")), eager(*split(x.double(), "second")))


def views(width, dtype):
    """Return tensors whose rows are not contiguous, by name."""
    x = random(4, 6, 5, width + 8, dtype=dtype)
    deep = random(3, 3, 3, 3, 3, 2 * width, dtype=dtype)
    return {
        "slice of each row": x[..., :width],
        "slice at an odd offset": x[..., 1 : width + 1],
        "every second row": x[:, :, ::2, :width],
        "permuted": x[..., :width].permute(2, 0, 1, 3),
        "leading dimensions that do not fold": x[:3, 1:5, :4, 8:],
        "more of them than are read in place": deep.permute(4, 2, 0, 1, 3, 5)[..., :width],
        "expanded rows": random(1, width, dtype=dtype).expand(7, width),
        "expanded elements": random(7, 1, dtype=dtype).expand(7, width),
        "elements apart": random(width, 9, dtype=dtype).t(),
        "odd storage offset": random(6 * width + 1, dtype=dtype)[1:].view(6, width),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [34, 64])
def test_strides(width, dtype):
    for name, x in views(width, dtype).items():
        out = kernel.geglu(x)
        assert torch.equal(out, kernel.geglu(x.contiguous())), name
        grad = random(*out.shape[::-1], dtype=dtype).permute(*reversed(range(out.dim())))
        grad_x = ops.geglu_halves_backward(grad, x, False, False)
        assert torch.equal(grad_x, ops.geglu_halves_backward(grad.contiguous(), x.contiguous(), False, False)), name
        up = random(*x.shape[::-1], dtype=dtype).permute(*reversed(range(x.dim())))
        for gate, other in ((x, up), (up, x)):
            same = [t.contiguous() for t in (gate, other)]
            assert torch.equal(kernel.geglu_pair(gate, other), kernel.geglu_pair(*same)), name
            grads = ops.geglu_pair_backward(up, gate, other, True)
            for a, b in zip(grads, ops.geglu_pair_backward(up.contiguous(), *same, True)):
                assert torch.equal(a, b), name


def test_rows_are_read_in_place():
    storage = random(64, 3, 256, dtype=torch.float32)

    def copies(function, *arguments):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function(*arguments)
        return {event.name for event in profile.events()} & {"aten::clone", "aten::contiguous", "aten::copy_"}

    assert not copies(kernel.geglu, storage[:, 1:, :128])
    assert not copies(kernel.geglu_pair, *storage.chunk(2, -1))
    assert copies(kernel.geglu, storage[:, :, ::2])


@pytest.mark.parametrize("shape", [(0, 64), (4, 0, 64), (4, 0), (0,)])
def test_empty(shape):
    x = random(*shape, dtype=torch.float16, requires_grad=True)
    half = (*shape[:-1], shape[-1] // 2)
    assert kernel.geglu(x).shape == half
    assert kernel.geglu_pair(x, x).shape == shape
    kernel.geglu(x).sum().backward()
    assert x.grad.shape == shape
