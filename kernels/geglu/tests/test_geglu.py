"""Compare the built kernel with float64, on the GPU if there is one, else on the CPU.

The kernel is loaded from `build/` with the public client, as a user would load it.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernels import (
    LocalLayerRepository,
    Mode,
    get_local_kernel,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)

PROJECT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
APPROXIMATE = ["none", "tanh"]
GATES = ["second", "first"]
# One element, less and more than a vector, odd, not a multiple of a vector, and more than a block takes.
HIDDEN = [1, 3, 8, 17, 64, 100, 1000, 1280, 4097, 20001]

kernel = get_local_kernel(PROJECT)
ops = kernel._ops.ops


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype, requires_grad=False):
    return torch.randn(*shape, device=DEVICE).mul(2).to(dtype).requires_grad_(requires_grad)


def split(x, gate):
    """Return gate and up."""
    first, second = x.chunk(2, -1)
    return (first, second) if gate == "first" else (second, first)


def eager(gate, up, approximate="none"):
    """Return what models compute; with float64 inputs this is the reference."""
    return up * F.gelu(gate, approximate=approximate)


def assert_as_good(actual, reference, expected):
    """Assert that the error of `actual` is at most 1.1 times that of `reference`."""
    assert actual.dtype == reference.dtype and actual.shape == reference.shape
    if actual.numel() == 0:
        return
    scale = expected.abs().max().item()
    slack = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}[actual.dtype] * max(scale, 1.0)
    error = (actual.double() - expected).abs().max().item()
    allowed = 1.1 * (reference.double() - expected).abs().max().item() + slack
    assert error <= allowed


def gradients(function, inputs, grad):
    output = function(*inputs)
    return torch.autograd.grad(output, inputs, grad.to(output.dtype))


def doubles(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def units_apart(a, b):
    """Return the distance between two 16-bit tensors, in representable numbers."""
    ordered = [t.view(torch.int16).int() for t in (a, b)]
    ordered = [torch.where(bits < 0, -(bits & 0x7FFF), bits) for bits in ordered]
    return (ordered[0] - ordered[1]).abs()


# --- forward ---------------------------------------------------------------------------------------------------------


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
    """The mean error, in which chance does not hide an error of the last bits; also with many gates of 1 or -1, for
    which PyTorch's own errors happen to be small."""
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


# --- backward --------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, h) for h in HIDDEN] + [(1, 64), (700, 64), (2, 150, 136), (333, 65)])
def test_backward(shape, dtype, approximate):
    x = random(*shape[:-1], 2 * shape[-1], dtype=dtype, requires_grad=True)
    grad = random(*shape, dtype=dtype)
    for gate in GATES:

        def by_hand(x, gate=gate):
            return eager(*split(x, gate), approximate)

        (expected,), (reference,), (actual,) = (
            gradients(by_hand, doubles([x]), grad),
            gradients(by_hand, [x], grad),
            gradients(lambda x, gate=gate: kernel.geglu(x, approximate=approximate, gate=gate), [x], grad),
        )
        assert_as_good(actual, reference, expected)
        halves = [h.detach().requires_grad_() for h in split(x, gate)]
        pair = gradients(lambda g, u: kernel.geglu_pair(g, u, approximate), halves, grad)
        for of_pair, of_half in zip(pair, split(actual, gate)):
            assert torch.equal(of_pair, of_half)


@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_backward_of_the_reference(approximate):
    """The reference of the gradients is itself correct."""
    inputs = [torch.randn(3, 17, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda gate, up: eager(gate, up, approximate), inputs)


def test_only_what_needs_a_gradient_gets_one():
    gate, up = random(4, 64, dtype=torch.float32), random(4, 64, dtype=torch.float32)
    assert not kernel.geglu_pair(gate, up).requires_grad
    up.requires_grad_()
    (grad,) = torch.autograd.grad(kernel.geglu_pair(gate, up).sum(), up)
    torch.testing.assert_close(grad, F.gelu(gate))
    with torch.no_grad():
        assert not kernel.geglu_pair(gate, up).requires_grad


def test_second_derivative_is_refused():
    x = random(2, 8, dtype=torch.float32, requires_grad=True)
    for function in (kernel.geglu, lambda x: kernel.geglu_pair(x, x)):
        (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="second time"):
            grad.sum().backward()


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("message", "tensors"),
    [
        ("x must be float32, float16 or bfloat16", [torch.zeros(2, 8, dtype=torch.float64)]),
        ("x must have at least one dimension", [torch.zeros(())]),
        ("x must have an even number of elements in its last dimension, not 7", [torch.zeros(2, 7)]),
        ("gate must be float32, float16 or bfloat16", [torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 8)]),
        ("gate must have at least one dimension", [torch.zeros(()), torch.zeros(())]),
        (r"up must have shape \[2, 8\], not \[8\]", [torch.zeros(2, 8), torch.zeros(8)]),
        ("up must have the dtype of gate", [torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.bfloat16)]),
    ],
)
def test_errors_name_the_argument(message, tensors, fake):
    tensors = [tensor.to("meta" if fake else DEVICE) for tensor in tensors]
    with pytest.raises(RuntimeError, match=message):
        (kernel.geglu if len(tensors) == 1 else kernel.geglu_pair)(*tensors)


def test_choices_are_checked():
    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh', not 'erf'"):
        kernel.geglu(x, approximate="erf")
    with pytest.raises(ValueError, match="gate must be 'first' or 'second', not 'third'"):
        kernel.geglu(x, gate="third")
    with pytest.raises(ValueError, match="gate chooses a half of x"):
        kernel.geglu(x, x, gate="first")


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: it uses two devices")
def test_errors_name_the_argument_on_another_device():
    x = torch.zeros(2, 8, device="cuda")
    with pytest.raises(RuntimeError, match="up must be on the device of gate"):
        kernel.geglu_pair(x, x.cpu())
    with pytest.raises(RuntimeError, match="gate must be on a CUDA device"):
        kernel.geglu_pair(x.cpu(), x)


# --- torch.library, torch.compile, kernelize -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    x, y = (random(3, 5, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    strided = random(3, 24, 5, dtype=dtype).transpose(1, 2)
    grad = random(3, 5, 24, dtype=dtype)
    for tanh in (False, True):
        torch.library.opcheck(ops.geglu_halves.default, (x, tanh, True))
        torch.library.opcheck(ops.geglu_halves.default, (strided, tanh, False))
        torch.library.opcheck(ops.geglu_pair.default, (x, y, tanh))
        torch.library.opcheck(ops.geglu_halves_backward.default, (grad[..., :12], x.detach(), tanh, False))
        torch.library.opcheck(ops.geglu_pair_backward.default, (grad, x.detach(), y.detach(), tanh))


@pytest.mark.kernels_ci
def test_compile():
    def block(x, up):
        return kernel.geglu(kernel.geglu(x * 2, approximate="tanh"), up) + up

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 9):
        with torch.compiler.set_stance("fail_on_recompile" if batch == 9 else "default"):
            inputs = [random(batch, 3, n, dtype=torch.float32, requires_grad=True) for n in (96, 48)]
            expected = block(*inputs)
            actual = compiled(*inputs)
            torch.testing.assert_close(actual, expected)
            grad = torch.randn_like(expected)
            torch.testing.assert_close(
                torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad)
            )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the CPU runs compile another backend")
def test_compile_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: kernel.geglu(x + 1) * 2, fullgraph=True, dynamic=True)
    for batch in (4, 9):
        x = random(batch, 256, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x), kernel.geglu(x + 1) * 2)


class Projected(torch.nn.Module):
    """The GEGLU of diffusers."""

    def __init__(self, width, hidden):
        super().__init__()
        self.proj = torch.nn.Linear(width, 2 * hidden)

    def forward(self, hidden_states, *args, **kwargs):
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * F.gelu(gate)


class GELUActivation(torch.nn.Module):
    approximate = "none"

    def forward(self, x):
        return F.gelu(x, approximate=self.approximate)


class GELUTanh(GELUActivation):
    approximate = "tanh"


class MLP(torch.nn.Module):
    """The GemmaMLP of transformers."""

    def __init__(self, width, hidden, act_fn):
        super().__init__()
        self.gate_proj = torch.nn.Linear(width, hidden, bias=False)
        self.up_proj = torch.nn.Linear(width, hidden, bias=False)
        self.down_proj = torch.nn.Linear(hidden, width, bias=False)
        self.act_fn = act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def kernelized(layer, name):
    """Return `layer` with the kernel's `forward`, put there by kernelize."""
    marked = use_kernel_forward_from_hub(name)(
        type("Marked", (type(layer),), {})
    )  # a new class, because marking changes it
    layer.__class__ = marked
    model = torch.nn.Sequential(layer).to(DEVICE)
    mapping = {name: {DEVICE: LocalLayerRepository(PROJECT, layer_name=name)}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=DEVICE, use_fallback=False)
    assert layer.forward.__func__ is getattr(kernel.layers, name).forward
    return layer


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("GEGLU", lambda: Projected(16, 48)),
        ("GemmaMLP", lambda: MLP(16, 48, GELUTanh())),
        ("GemmaMLP", lambda: MLP(16, 48, GELUActivation())),
    ],
)
def test_layers(name, layer):
    layer = layer().to(DEVICE)
    x = random(5, 16, dtype=torch.float32)
    expected = layer(x)
    torch.testing.assert_close(kernelized(layer, name)(x), expected)


def test_layer_refuses_other_activations():
    layer = kernelized(MLP(16, 48, torch.nn.SiLU()), "GemmaMLP")
    with pytest.raises(ValueError, match=r"act_fn must be one of .*, not SiLU"):
        layer(random(5, 16, dtype=torch.float32))


# --- GPU only --------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@gpu
def test_stream():
    x = random(4096, 8192, dtype=torch.bfloat16)
    expected = kernel.geglu(x)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        out = kernel.geglu(late)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device():
    """The current device is not that of the tensors, and does not change."""
    x = random(64, 1000, dtype=torch.float16).to("cuda:1").requires_grad_()
    out = kernel.geglu(x)
    assert out.device == x.device and torch.cuda.current_device() == 0
    torch.testing.assert_close(out, eager(*split(x, "second")), rtol=2e-3, atol=2e-3)
    (grad,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(eager(*split(x, "second")).sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-2, atol=1e-2)


@gpu
def test_graph():
    x = random(64, 1000, dtype=torch.float16, requires_grad=True)
    grad = random(64, 500, dtype=torch.float16)

    def step():
        out = kernel.geglu(x)
        return out.detach(), *torch.autograd.grad(out, x, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(random(64, 1000, dtype=torch.float16))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step()))


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
