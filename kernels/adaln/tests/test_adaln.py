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
EPS = 1e-6
# One element, less and more than a vector, odd, not a multiple of a vector, several rows per warp, one per warp and per
# block, with one and more vectors per thread, and rows longer than the registers hold.
HIDDEN = [1, 3, 8, 17, 64, 72, 100, 248, 512, 1000, 1152, 2048, 3072, 5001, 5120, 7168, 9000, 20001]
LONG = 120001  # more 16-bit elements than shared memory holds
MODULATIONS = ["[B, 1, C]", "[B, C]", "[C]", "[B, S, C]"]

kernel = get_local_kernel(PROJECT)
ops = kernel._ops.ops


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype, requires_grad=False):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_(requires_grad)


def modulations(kind, batch, length, hidden, dtype, count=2):
    """Return strided slices of one tensor, of the given shape, as in models."""
    if kind == "[C]":
        return list(random(count, hidden, dtype=dtype).unbind(0))
    if kind == "[B, C]":
        return list(random(batch, count, hidden, dtype=dtype).unbind(1))
    return list(random(batch, length if kind == "[B, S, C]" else 1, count, hidden, dtype=dtype).unbind(2))


def spread(modulation, x):
    """Return the modulation in a shape that broadcasts with `x`."""
    if modulation is None or modulation.dim() in (1, x.dim()):
        return modulation
    return modulation.reshape(*modulation.shape[:-1], *[1] * (x.dim() - modulation.dim()), modulation.shape[-1])


def formula(x, scale, shift, weight=None, bias=None, eps=EPS, layer=True):
    """Return the modulated norm in the precision of `x`."""
    centered = x - x.mean(-1, keepdim=True) if layer else x
    normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    normed = normed if bias is None else normed + bias
    return normed if scale is None else normed * (1 + spread(scale, x)) + spread(shift, x)


def precisely(function, dtype):
    """Return the function with its arguments converted to another precision."""

    def convert(argument):
        return argument.to(dtype) if isinstance(argument, torch.Tensor) else argument

    return lambda *arguments, **named: function(*map(convert, arguments), **{k: convert(v) for k, v in named.items()})


exact = precisely(formula, torch.float64)


def eager(x, *arguments, **named):
    """Return what a user would write: in float32, rounded once."""
    return precisely(formula, torch.float32)(x, *arguments, **named).to(x.dtype)


def gated(residual, branch, gate):
    return residual + branch * spread(gate, residual)


exact_gated = precisely(gated, torch.float64)


def eager_gated(residual, branch, gate):
    return precisely(gated, torch.float32)(residual, branch, gate).to(residual.dtype)


def ada_norm(x, scale, shift, weight=None, bias=None, eps=EPS, layer=True):
    if layer:
        return kernel.ada_layer_norm(x, scale, shift, weight, bias, eps)
    return kernel.ada_rms_norm(x, scale, shift, weight, eps)


def assert_as_good(actual, reference, expected):
    """Assert that the error of `actual` is at most 1.1 times that of `reference`."""
    assert actual.dtype == reference.dtype and actual.shape == reference.shape
    if actual.numel() == 0:
        return
    scale = expected.abs().max().item()
    slack = {torch.float32: 2e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}[actual.dtype] * max(scale, 1.0)
    error = (actual.double() - expected).abs().max().item()
    allowed = 1.1 * (reference.double() - expected).abs().max().item() + slack
    assert error <= allowed


def gradients(function, inputs, grads):
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [i for i in inputs if i is not None and i.requires_grad]
    return torch.autograd.grad(outputs, wanted, [g.to(o.dtype) for g, o in zip(grads, outputs)])


def assert_gradients(function, eager_function, exact_function, inputs, grads):
    doubles = [None if i is None else i.detach().double().requires_grad_(i.requires_grad) for i in inputs]
    expected = gradients(exact_function, doubles, grads)
    reference = gradients(eager_function, inputs, grads)
    actual = gradients(function, inputs, grads)
    for a, r, e in zip(actual, reference, expected):
        assert_as_good(a, r, e)


def leaves(*tensors):
    return [t.detach().requires_grad_() for t in tensors]


# --- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [*HIDDEN, LONG])
def test_forward(hidden, dtype):
    x = random(2, 5, hidden, dtype=dtype)
    for layer in (True, False):
        for kind in MODULATIONS:
            for modulation_dtype in {dtype, torch.float32}:
                scale, shift = modulations(kind, 2, 5, hidden, modulation_dtype)
                normed = ada_norm(x, scale, shift, layer=layer)
                assert normed.is_contiguous()
                assert_as_good(normed, eager(x, scale, shift, layer=layer), exact(x, scale, shift, layer=layer))
        weight, bias = random(hidden, dtype=dtype), random(hidden, dtype=torch.float32) if layer else None
        arguments = (x, scale, shift, weight, bias, EPS, layer)
        assert_as_good(ada_norm(*arguments), eager(*arguments), exact(*arguments))
        arguments = (x, None, None, weight, bias, EPS, layer)
        assert_as_good(ada_norm(*arguments), eager(*arguments), exact(*arguments))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [*HIDDEN, LONG])
def test_gated_forward(hidden, dtype):
    residual, branch = (random(2, 5, hidden, dtype=dtype) for _ in range(2))
    for kind in MODULATIONS:
        for modulation_dtype in {dtype, torch.float32}:
            gate, scale, shift = modulations(kind, 2, 5, hidden, modulation_dtype, 3)
            total = kernel.gate_residual(residual, branch, gate)
            assert_as_good(total, eager_gated(residual, branch, gate), exact_gated(residual, branch, gate))
            for norm in ("layer", "rms"):
                both = kernel.gate_residual_ada_norm(residual, branch, gate, scale, shift, eps=EPS, norm=norm)
                assert torch.equal(both[0], total)
                arguments = (total, scale, shift, None, None, EPS, norm == "layer")
                assert_as_good(both[1], eager(*arguments), exact(*arguments))
    weight, bias = random(hidden, dtype=dtype), random(hidden, dtype=dtype)
    total, normed = kernel.gate_residual_ada_norm(residual, branch, gate, None, None, weight, bias, EPS)
    arguments = (total, None, None, weight, bias)
    assert_as_good(normed, eager(*arguments), exact(*arguments))


@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(512, 4096), (1000, 1000), (64, 30000)])
def test_error_over_many_rows(shape, dtype, layer):
    """The mean error over many rows, in which chance does not hide a norm that is wrong for a whole row."""
    x, scale, shift = random(1, *shape, dtype=dtype) + 3, *modulations("[B, C]", 1, 1, shape[-1], dtype)
    expected = exact(x, scale, shift, layer=layer)
    ours = (ada_norm(x, scale, shift, layer=layer).double() - expected).norm()
    assert ours <= 1.1 * (eager(x, scale, shift, layer=layer).double() - expected).norm()


@pytest.mark.parametrize("hidden", [64, 3072, 20001])
def test_variance_of_a_row_far_from_zero(hidden):
    """A mean of squares minus the square of the mean would have no digits left."""
    x = random(4, hidden, dtype=torch.float32) + 10000
    expected = exact(x, None, None)
    torch.testing.assert_close(ada_norm(x, None, None).double(), expected, rtol=0, atol=2e-3)


def assert_neighbours(actual, expected, added=0.0):
    """Assert equality, except for less than 0.5 % of the elements, which may be a neighbouring number.

    `added`: the summand of the last step. The product before it may have been larger than the result; if the norm has
    rounded to a neighbouring number, the product may be two numbers away.
    """
    assert (actual != expected).float().mean() < 5e-3
    step = torch.finfo(expected.dtype).eps * (expected.abs() + 2 * (expected - added).abs()).float()
    assert ((actual.float() - expected.float()).abs() <= step + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matches_the_code_of_wan(dtype):
    x, branch = (random(2, 100, 1536, dtype=dtype) for _ in range(2))
    scale, shift, gate = modulations("[B, 1, C]", 2, 100, 1536, torch.float32, 3)
    normed = (F.layer_norm(x.float(), (1536,), eps=EPS) * (1 + scale) + shift).to(dtype)
    assert_neighbours(kernel.ada_layer_norm(x, scale, shift, eps=EPS), normed)
    assert_neighbours(kernel.gate_residual(x, branch, gate), (x.float() + branch * gate).to(dtype))
    weight, bias = random(2, 1536, dtype=torch.float32)
    normed = F.layer_norm(x.float(), (1536,), weight, bias, EPS).to(dtype)
    assert_neighbours(kernel.ada_layer_norm(x, None, None, weight, bias, EPS), normed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matches_the_code_of_ltx(dtype):
    x, branch = (random(2, 100, 1536, dtype=dtype) for _ in range(2))
    table, embedding = random(6, 1536, dtype=dtype), random(2, 1, 6, 1536, dtype=dtype)
    shift, scale, gate, *_ = (table[None, None] + embedding).unbind(2)

    def rms_norm(x):
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)).to(dtype)

    normed = kernel.ada_rms_norm(x, scale, shift, eps=EPS, rounding="each")
    assert_neighbours(normed, rms_norm(x) * (1 + scale) + shift, shift)
    total = x + branch * gate
    assert_neighbours(kernel.gate_residual(x, branch, gate, "each"), total, x)
    both = kernel.gate_residual_ada_norm(x, branch, gate, scale, shift, eps=EPS, norm="rms", rounding="each")
    assert_neighbours(both[0], total, x)
    assert_neighbours(both[1], rms_norm(both[0]) * (1 + scale) + shift, shift)
    # LayerNorm with the same modulation: DiT, PixArt.
    normed = kernel.ada_layer_norm(x, scale, shift, eps=EPS, rounding="each")
    assert_neighbours(normed, F.layer_norm(x, (1536,), eps=EPS) * (1 + scale) + shift, shift)


def test_rounding_of_each_step_in_float32():
    x, branch, scale, shift, gate, weight, bias = random(7, 5, 40, dtype=torch.float32)
    arguments = (x, branch, gate, scale, shift, weight[0], bias[0])
    torch.testing.assert_close(
        kernel.gate_residual_ada_norm(*arguments, rounding="each"), kernel.gate_residual_ada_norm(*arguments)
    )


def test_rounding_after_weight_and_bias():
    x, weight, bias = random(6, 40, dtype=torch.bfloat16), *random(2, 40, dtype=torch.bfloat16)
    expected = F.layer_norm(x, (40,), weight, bias, EPS)
    for rounding in ("last", "each"):
        actual = kernel.ada_layer_norm(x, None, None, weight, bias, EPS, rounding)
        torch.testing.assert_close(actual, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-5)


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_eps(eps):
    x, scale, shift = (random(6, 40, dtype=torch.float32, requires_grad=True) for _ in range(3))
    for layer in (True, False):
        functions = [lambda *a, f=f, layer=layer: f(*a, None, None, eps, layer) for f in (ada_norm, eager, exact)]
        assert_as_good(*(f(x, scale, shift) for f in functions))
        assert_gradients(*functions, [x, scale, shift], [random(6, 40, dtype=torch.float32)])


@pytest.mark.parametrize(
    ("shape", "modulation"),
    [
        ((64,), (64,)),
        ((1, 64), (64,)),
        ((3000, 64), (3000, 64)),
        ((3000, 64), (1, 64)),
        ((2, 3, 5, 96), (2, 96)),
        ((2, 3, 5, 96), (2, 3, 96)),
        ((2, 3, 5, 96), (2, 3, 1, 96)),
        ((2, 3, 5, 96), (1, 1, 1, 96)),
        ((2, 1, 96), (2, 1, 96)),
        ((40, 300, 1), (40, 1, 1)),
        ((7, 1000, 200), (7, 200)),
        ((1, 2500, 2048), (1, 1, 2048)),
    ],
)
def test_shapes(shape, modulation):
    x, branch = (random(*shape, dtype=torch.float16, requires_grad=True) for _ in range(2))
    scale, shift, gate = (random(*modulation, dtype=torch.float16, requires_grad=True) for _ in range(3))
    assert_as_good(ada_norm(x, scale, shift), eager(x, scale, shift), exact(x, scale, shift))
    grad = random(*shape, dtype=torch.float16)
    assert_gradients(ada_norm, eager, exact, [x, scale, shift], [grad])
    assert_gradients(kernel.gate_residual, eager_gated, exact_gated, [x, branch, gate], [grad])


def views(hidden, dtype):
    """Return tensors whose rows are not contiguous, by name."""
    x = random(4, 6, 5, hidden + 8, dtype=dtype)
    deep = random(3, 3, 3, 3, 3, 2 * hidden, dtype=dtype)
    return {
        "slice of each row": x[..., :hidden],
        "slice at an odd offset": x[..., 1 : hidden + 1],
        "permuted": x[..., :hidden].permute(2, 0, 1, 3),
        "more leading dimensions than are read in place": deep.permute(4, 2, 0, 1, 3, 5)[..., :hidden],
        "expanded rows": random(1, hidden, dtype=dtype).expand(7, hidden),
        "expanded elements": random(7, 1, dtype=dtype).expand(7, hidden),
        "elements apart": random(hidden, 9, dtype=dtype).t(),
        "odd storage offset": random(6 * hidden + 1, dtype=dtype)[1:].view(6, hidden),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [33, 64])
def test_strides(hidden, dtype):
    weight, bias = random(2, 2 * hidden, dtype=dtype)
    for name, x in views(hidden, dtype).items():
        for other in (x, random(*x.shape[::-1], dtype=dtype).permute(*reversed(range(x.dim())))):
            for w, b in ((weight[:hidden], bias[::2]), (weight[1 : hidden + 1], None)):
                tensors = (x, other, x, other, x)
                arguments = (*tensors, w, b)
                copied = (*(t.contiguous() for t in tensors), w.contiguous(), None if b is None else b.contiguous())
                actual = kernel.gate_residual_ada_norm(*arguments)
                expected = kernel.gate_residual_ada_norm(*copied)
                close = {"rtol": 1e-2, "atol": 1e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-4}
                torch.testing.assert_close(actual, expected, **close, msg=name)
                torch.testing.assert_close(kernel.gate_residual(*arguments[:3]), expected[0], msg=name)
                flags = (EPS, True, True, True, True)
                actual = ops.ada_norm_backward(x, other, x, w, b, other, x, other, *flags)
                same = [t.contiguous() for t in (x, other)]
                expected = ops.ada_norm_backward(
                    same[0], same[1], same[0], *copied[5:], same[1], same[0], same[1], *flags
                )
                torch.testing.assert_close(actual, expected, **close, msg=name)


@pytest.mark.parametrize("count", [6, 7])
@pytest.mark.parametrize("hidden", [64, 1000, 1152])
def test_some_tokens_of_each_sample(hidden, count):
    """Models with two streams have rows in two dimensions that do not fold."""
    whole = random(2, 3, 9, hidden, dtype=torch.bfloat16)
    x, branch = whole[0, :, 1 : 1 + count], whole[1, :, 2 : 2 + count]
    gate, scale, shift = modulations("[B, 1, C]", 3, count, hidden, torch.bfloat16, 3)
    weight, bias = random(2, hidden, dtype=torch.bfloat16)
    for w, b in ((None, None), (weight, bias)):
        for function, arguments in (
            (kernel.gate_residual_ada_norm, (x, branch, gate, scale, shift, w, b)),
            (kernel.ada_layer_norm, (x, scale, shift, w, b)),
            (kernel.ada_layer_norm, (x, None, None, w, b)),
            (kernel.gate_residual, (x, branch, gate)),
        ):
            given = leaves(*(a for a in arguments if a is not None))
            copies = leaves(*(a.contiguous() for a in arguments if a is not None))
            results = []
            for tensors in (given, copies):
                rest = iter(tensors)
                out = function(*(None if a is None else next(rest) for a in arguments))
                out = out if isinstance(out, tuple) else (out,)
                results.append((out, torch.autograd.grad(out, tensors, [x] * len(out))))
            for actual, expected in zip(*results):
                torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_rows_are_read_in_place():
    x = random(2, 64, 3, 256, dtype=torch.float32)
    table = random(2, 64, 6, 128, dtype=torch.float32)

    def copies(x, modulation):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            kernel.gate_residual_ada_norm(x, x, modulation, modulation, modulation)
        return {event.name for event in profile.events()} & {"aten::clone", "aten::contiguous", "aten::copy_"}

    for modulation in (table[:, :, 2], table[:, :1, 5], table[:, 7, 1]):
        assert not copies(x[:, :, 1, :128], modulation)
    assert copies(x[:, :, 1, ::2], modulation)


@pytest.mark.parametrize("shape", [(0, 4, 64), (4, 0, 64), (4, 3, 0)])
def test_empty(shape):
    x, branch = (random(*shape, dtype=torch.float16, requires_grad=True) for _ in range(2))
    scale, shift, gate = (random(shape[0], 1, shape[2], dtype=torch.float16, requires_grad=True) for _ in range(3))
    weight = random(shape[2], dtype=torch.float16, requires_grad=True)
    assert kernel.gate_residual(x, branch, gate).shape == shape
    total, normed = kernel.gate_residual_ada_norm(x, branch, gate, scale, shift, weight)
    assert total.shape == normed.shape == shape
    inputs = [x, branch, gate, scale, shift, weight]
    for grad, tensor in zip(torch.autograd.grad(normed.sum() + total.sum(), inputs), inputs):
        assert torch.equal(grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("hidden", [17, 64])
def test_not_finite(hidden, value, dtype):
    x = random(3, hidden, dtype=dtype)
    x[1, 5] = value
    scale, shift = random(2, hidden, dtype=dtype)
    for layer in (True, False):
        normed, expected = (f(x, scale, shift, layer=layer) for f in (ada_norm, eager))
        assert torch.allclose(normed, expected, rtol=1e-2, atol=1e-2, equal_nan=True)
    total = kernel.gate_residual(x, x, scale)
    assert torch.allclose(total, eager_gated(x, x, scale), rtol=1e-2, atol=1e-2, equal_nan=True)


# --- backward --------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_backward(hidden, dtype):
    for layer in (True, False):
        for kind in MODULATIONS:
            for modulation_dtype in {dtype, torch.float32}:
                x, grad = random(2, 5, hidden, dtype=dtype, requires_grad=True), random(2, 5, hidden, dtype=dtype)
                scale, shift = leaves(*modulations(kind, 2, 5, hidden, modulation_dtype))
                weight = random(hidden, dtype=dtype, requires_grad=True)
                bias = random(hidden, dtype=torch.float32, requires_grad=True) if layer else None
                functions = [lambda *a, f=f, layer=layer: f(*a, EPS, layer) for f in (ada_norm, eager, exact)]
                assert_gradients(*functions, [x, scale, shift, None, None], [grad])
                assert_gradients(*functions, [x, scale, shift, weight, bias], [grad])
        assert_gradients(*functions, [x, None, None, weight, bias], [grad])


def fused(norm_function, gate_function, norm):
    def function(residual, branch, gate, scale, shift, weight=None, bias=None):
        total = gate_function(residual, branch, gate)
        return total, norm_function(total, scale, shift, weight, bias, EPS, norm == "layer")

    return function


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_gated_backward(hidden, dtype):
    def exact_rounded(residual, branch, gate):
        total = exact_gated(residual, branch, gate)
        # The forward pass rounds the sum; its gradient is that of the rounded value.
        return total + (total.to(dtype).double() - total).detach()

    for kind in MODULATIONS:
        residual, branch = (random(2, 5, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
        grads = [random(2, 5, hidden, dtype=dtype) for _ in range(2)]
        gate, scale, shift = leaves(*modulations(kind, 2, 5, hidden, dtype, 3))
        weight, bias = (random(hidden, dtype=dtype, requires_grad=True) for _ in range(2))
        assert_gradients(kernel.gate_residual, eager_gated, exact_gated, [residual, branch, gate], grads[:1])
        for norm in ("layer", "rms"):

            def ours(*arguments, norm=norm):
                return kernel.gate_residual_ada_norm(*arguments, EPS, norm)

            references = fused(eager, eager_gated, norm), fused(exact, exact_rounded, norm)
            for affine in ([None, None], [weight, bias]):
                assert_gradients(ours, *references, [residual, branch, gate, scale, shift, *affine], grads)
            assert_gradients(ours, *references, [residual, branch, gate, None, None, weight, bias], grads)


@pytest.mark.parametrize("kind", MODULATIONS)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 64), (1, 1, 1001), (1, 1, 3072), (1, 9000, 8), (1, 700, 64), (2, 900, 65), (3, 301, 136), (2, 150, 1000)],
)
def test_backward_of_one_and_of_many_rows(shape, kind):
    x, branch, grad = (random(*shape, dtype=torch.float32, requires_grad=True) for _ in range(3))
    gate, scale, shift = leaves(*modulations(kind, *shape, torch.float32, 3))
    weight, bias = (random(shape[-1], dtype=torch.float32, requires_grad=True) for _ in range(2))
    references = (fused(f, g, "layer") for f, g in ((eager, eager_gated), (exact, exact_gated)))
    inputs = [x, branch, gate, scale, shift, weight, bias]
    assert_gradients(kernel.gate_residual_ada_norm, *references, inputs, [grad, x.detach()])


@pytest.mark.parametrize("kind", ["[C]", "[B, C]"])
@pytest.mark.parametrize("hidden", [257, 1001, 1002, 1004, 2049, 4097, 8191])
def test_backward_of_rows_that_begin_within_vectors(hidden, kind):
    """Sums over few and many rows equal those in float32, rounded."""
    for rows in (1, 2, 7, 9, 300):
        x, grad, branch, grad_sum = (random(2, rows, hidden, dtype=torch.bfloat16) for _ in range(4))
        x[:, ::5] += 20
        gate, scale = modulations(kind, 2, rows, hidden, torch.bfloat16)
        weight, bias = random(2, hidden, dtype=torch.bfloat16)
        for more in ((None, None, None), (grad_sum, branch, gate)):
            given = (grad, x, scale, weight, bias, *more)
            wide = (None if t is None else t.float() for t in given)
            switches = (EPS, True, True, True, more[2] is not None)
            for actual, expected in zip(
                ops.ada_norm_backward(*given, *switches), ops.ada_norm_backward(*wide, *switches)
            ):
                torch.testing.assert_close(actual.float(), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("hidden", [64, 1001])
def test_backward_of_strides(hidden):
    scale, shift = random(2, hidden, dtype=torch.bfloat16)
    for name, x in views(hidden, torch.bfloat16).items():
        for grad in (x, random(*x.shape, dtype=torch.bfloat16)):
            actual, expected = (
                torch.autograd.grad(kernel.ada_layer_norm(*inputs, shift), inputs, grad)
                for inputs in (leaves(x, scale), leaves(x.contiguous(), scale))
            )
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=5e-2, msg=name)


@pytest.mark.parametrize("kind", ["[C]", "[B, S, C]"])
@pytest.mark.parametrize("hidden", [8, 17, 72, 520, 1001, 4097])
def test_rows_that_are_no_numbers_stay_alone(hidden, kind):
    x, grad, branch, grad_sum = (random(1, 40, hidden, dtype=torch.bfloat16) for _ in range(4))
    gate, scale = modulations(kind, 1, 40, hidden, torch.bfloat16)
    weight, bias = random(2, hidden, dtype=torch.bfloat16)
    results = []
    for value in (0.0, float("nan")):
        for tensor in (x, grad, branch, grad_sum):
            tensor[:, 1::3] = value
        results.append(
            ops.ada_norm_backward(grad, x, scale, weight, bias, grad_sum, branch, gate, EPS, True, True, True, True)
        )
    for expected, actual in zip(*results):
        if expected.shape == x.shape:
            assert actual[:, 1::3].isnan().all()
            kept = [row for row in range(40) if row % 3 != 1]
            assert torch.equal(actual[:, kept], expected[:, kept])


def test_only_what_needs_a_gradient_gets_one():
    inputs = [random(4, 6, 64, dtype=torch.float32) for _ in range(2)]
    inputs += [*modulations("[B, C]", 4, 6, 64, torch.float32, 3), *random(2, 64, dtype=torch.float32)]
    assert not any(t.requires_grad for t in kernel.gate_residual_ada_norm(*inputs))
    everything = leaves(*inputs)
    expected = torch.autograd.grad(kernel.gate_residual_ada_norm(*everything)[1].square().sum(), everything)
    for i, tensor in enumerate(inputs):
        alone = [*inputs[:i], tensor.detach().requires_grad_(), *inputs[i + 1 :]]
        (grad,) = torch.autograd.grad(kernel.gate_residual_ada_norm(*alone)[1].square().sum(), alone[i])
        torch.testing.assert_close(grad, expected[i])
    with torch.no_grad():
        assert not kernel.gate_residual(*everything[:3]).requires_grad


@pytest.mark.parametrize("used", [0, 1])
def test_gradient_through_one_of_two_results(used):
    inputs = [random(4, 6, 64, dtype=torch.float32, requires_grad=True) for _ in range(2)]
    inputs += leaves(*modulations("[B, C]", 4, 6, 64, torch.float32, 3))
    reference = fused(eager, eager_gated, "layer")
    expected, actual = (f(*inputs)[used].square().sum() for f in (reference, kernel.gate_residual_ada_norm))
    inputs = inputs if used else inputs[:3]
    torch.testing.assert_close(torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs))


@pytest.mark.parametrize("kind", MODULATIONS)
def test_gradients_are_equal_to_the_bit(kind):
    x = random(3, 400, 520, dtype=torch.bfloat16)
    gate, scale = modulations(kind, 3, 400, 520, torch.bfloat16)
    weight, bias = random(2, 520, dtype=torch.float32)
    arguments = (x, x, scale, weight, bias, x, x, gate, EPS, True, True, True, True)
    first = ops.ada_norm_backward(*arguments)
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        again = ops.ada_norm_backward(*arguments)
        torch.set_num_threads(before)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_second_derivative_is_refused():
    x = random(2, 8, dtype=torch.float32, requires_grad=True)
    for result in (kernel.ada_rms_norm(x, None, None), kernel.gate_residual(x, x, x)):
        (grad,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="second time"):
            grad.sum().backward()


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("residual must be float32, float16 or bfloat16", {"residual": torch.zeros(2, 5, 8, dtype=torch.float64)}),
        ("residual must have at least one dimension", {"residual": torch.zeros(())}),
        (r"branch must have shape \[2, 5, 8\], not \[5, 8\]", {"branch": torch.zeros(5, 8)}),
        ("branch must have the dtype of residual", {"branch": torch.zeros(2, 5, 8, dtype=torch.float16)}),
        (r"gate must have the shape of residual, \[2, 5, 8\], .* not \[5, 8\]", {"gate": torch.zeros(5, 8)}),
        (r"scale must have the shape of residual, .* not \[1, 5, 8\]", {"scale": torch.zeros(1, 5, 8)}),
        (r"shift must have the shape of residual, .* not \[2, 7\]", {"shift": torch.zeros(2, 7)}),
        ("shift must have as many rows as scale", {"shift": torch.zeros(2, 5, 8)}),
        ("gate must have as many rows as scale", {"gate": torch.zeros(8)}),
        ("scale must have the dtype of residual, or float32", {"scale": torch.zeros(2, 8, dtype=torch.float16)}),
        ("shift must be given, too", {"shift": None}),
        ("scale must be given, too", {"scale": None}),
        (r"weight must have shape \[8\], not \[7\]", {"weight": torch.zeros(7)}),
        ("bias must have the dtype of residual, or float32", {"bias": torch.zeros(8, dtype=torch.float16)}),
    ],
)
def test_errors_name_the_argument(message, arguments, fake):
    device = "meta" if fake else DEVICE
    given = {name: torch.zeros(2, 8) for name in ("gate", "scale", "shift")}
    given = {"residual": torch.zeros(2, 5, 8), "branch": torch.zeros(2, 5, 8), **given, **arguments}
    given = {name: tensor if tensor is None else tensor.to(device) for name, tensor in given.items()}
    with pytest.raises(RuntimeError, match=message):
        kernel.gate_residual_ada_norm(**given)


def test_shift_has_the_dtype_of_scale():
    x, half = torch.zeros(2, 5, 8, device=DEVICE).half(), torch.zeros(2, 8, device=DEVICE).half()
    for device in (DEVICE, "meta"):
        with pytest.raises(RuntimeError, match="shift must have the dtype of scale"):
            kernel.ada_layer_norm(x.to(device), half.to(device), half.float().to(device))


def test_unknown_norm_or_rounding():
    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(ValueError, match="norm must be"):
        kernel.gate_residual_ada_norm(x, x, x, x, x, norm="batch")
    for function, arguments in ((kernel.ada_layer_norm, 3), (kernel.ada_rms_norm, 3), (kernel.gate_residual, 3)):
        with pytest.raises(ValueError, match="rounding must be"):
            function(*[x] * arguments, rounding="first")


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: it uses two devices")
def test_errors_name_the_argument_on_another_device():
    x, other = torch.zeros(2, 8, device="cuda"), torch.zeros(2, 8)
    with pytest.raises(RuntimeError, match="scale must be on the device of x"):
        kernel.ada_rms_norm(x, other, x)
    with pytest.raises(RuntimeError, match="branch must be on the device of residual"):
        kernel.gate_residual(x, other, x)


# --- torch.library, torch.compile ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODULATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype, kind):
    x, branch = (random(3, 5, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    gate, scale, shift = leaves(*modulations(kind, 3, 5, 24, dtype, 3))
    weight, bias = (random(24, dtype=dtype, requires_grad=True) for _ in range(2))
    strided = random(3, 24, 5, dtype=dtype).transpose(1, 2)
    torch.library.opcheck(ops.gate_residual.default, (x, branch, gate, False))
    torch.library.opcheck(ops.gate_residual_backward.default, (strided, branch.detach(), gate.detach(), True))
    for w, b in ((None, None), (weight, bias)):
        torch.library.opcheck(ops.ada_norm.default, (x, scale, shift, w, b, EPS, True, False))
        torch.library.opcheck(ops.ada_norm.default, (strided, None, None, w, b, EPS, False, True))
        arguments = (x, branch, gate, scale, shift, w, b, EPS, True, False)
        torch.library.opcheck(ops.gate_residual_ada_norm.default, arguments)
        given = [None if t is None else t.detach() for t in (strided, x, scale, w, b)]
        for more in ([None, None, None], [x.detach(), branch.detach(), gate.detach()]):
            arguments = (*given, *more, EPS, True, True, w is not None, more[2] is not None)
            torch.library.opcheck(ops.ada_norm_backward.default, arguments)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("kind", ["[B, 1, C]", "[B, S, C]"])
def test_compile(kind):
    def block(x, branch, gate, scale, shift):
        total, normed = kernel.gate_residual_ada_norm(x * 2, branch, gate, scale, shift, norm="rms")
        return kernel.gate_residual(total, kernel.ada_layer_norm(normed, scale, shift), gate)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 9):
        with torch.compiler.set_stance("fail_on_recompile" if batch == 9 else "default"):
            inputs = [random(batch, 3, 48, dtype=torch.float32, requires_grad=True) for _ in range(2)]
            inputs += leaves(*modulations(kind, batch, 3, 48, torch.float32, 3))
            expected, actual = block(*inputs), compiled(*inputs)
            torch.testing.assert_close(actual, expected)
            grad = torch.randn_like(expected)
            torch.testing.assert_close(
                torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad)
            )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the CPU runs compile another backend")
def test_compile_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, s: kernel.ada_layer_norm(x + 1, s, s) * 2, fullgraph=True, dynamic=True)
    for batch in (4, 9):
        x, scale = random(batch, 7, 256, dtype=torch.bfloat16), random(batch, 1, 256, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x, scale), kernel.ada_layer_norm(x + 1, scale, scale) * 2)


# --- layers ----------------------------------------------------------------------------------------------------------


class FP32LayerNorm(torch.nn.LayerNorm):
    """The module of diffusers."""

    def forward(self, inputs):
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        return F.layer_norm(inputs.float(), self.normalized_shape, weight, bias, self.eps).to(inputs.dtype)


class AdaLayerNorm(torch.nn.Module):
    """The common part of diffusers' modules of this name."""

    def __init__(self, size, chunks, affine=False):
        super().__init__()
        self.emb = None
        self.silu = torch.nn.SiLU()
        self.linear = torch.nn.Linear(size, chunks * size)
        self.norm = torch.nn.LayerNorm(size, elementwise_affine=affine, eps=1e-6)


class AdaLayerNormZero(AdaLayerNorm):
    def forward(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
        shift, scale, *others = self.linear(self.silu(emb)).chunk(6, dim=1)
        return (self.norm(x) * (1 + scale[:, None]) + shift[:, None], *others)


class AdaLayerNormZeroSingle(AdaLayerNorm):
    def forward(self, x, emb=None):
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate


class AdaLayerNormContinuous(AdaLayerNorm):
    def forward(self, x, conditioning_embedding):
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]


def kernelized(module, layer):
    marked = use_kernel_forward_from_hub("Norm")(
        type("Norm", (type(module),), {})
    )  # a new class, because marking changes it
    module.__class__ = marked
    mapping = {"Norm": {DEVICE: LocalLayerRepository(PROJECT, layer_name=layer)}}
    model = torch.nn.Sequential(module)
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=DEVICE, use_fallback=False)
    assert module.forward.__func__ is getattr(kernel.layers, layer).forward
    return module


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layer", "module", "named"),
    [
        ("LayerNorm", lambda: torch.nn.LayerNorm(64), None),
        ("LayerNorm", lambda: torch.nn.LayerNorm(64, eps=0.5, elementwise_affine=False), None),
        ("FP32LayerNorm", lambda: FP32LayerNorm(64), None),
        ("FP32LayerNorm", lambda: FP32LayerNorm(64, bias=False), None),
        ("AdaLayerNormZero", lambda: AdaLayerNormZero(64, 6), "emb"),
        ("AdaLayerNormZeroSingle", lambda: AdaLayerNormZeroSingle(64, 3), "emb"),
        ("AdaLayerNormContinuous", lambda: AdaLayerNormContinuous(64, 2), "conditioning_embedding"),
        ("AdaLayerNormContinuous", lambda: AdaLayerNormContinuous(64, 2, affine=True), "conditioning_embedding"),
    ],
)
def test_layers_of_models(layer, module, named, dtype):
    module = module().to(DEVICE, dtype)
    x = random(2, 5, 64, dtype=dtype, requires_grad=True)
    embedding = {} if named is None else {named: random(2, 64, dtype=dtype)}
    wanted = [x, *module.parameters()]

    def run():
        results = module(x, **embedding)
        results = results if isinstance(results, tuple) else (results,)
        return results, torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results])

    expected = run()
    module = kernelized(module, layer)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for actual, other in zip(run(), expected):
        torch.testing.assert_close(actual, other, **close)


def test_layer_takes_parameters_of_another_dtype():
    x, norm = random(2, 5, 64, dtype=torch.bfloat16), FP32LayerNorm(64).to(DEVICE, torch.float16)
    expected = norm(x)
    torch.testing.assert_close(kernelized(norm, "FP32LayerNorm")(x), expected)


def test_layer_refuses_more_than_one_dimension():
    norm = torch.nn.LayerNorm((4, 8), elementwise_affine=False)
    with pytest.raises(ValueError, match="normalized_shape"):
        kernel.layers.LayerNorm.forward(norm, torch.zeros(2, 4, 8, device=DEVICE))


# --- GPU only --------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@gpu
def test_stream():
    x, scale = random(4, 1024, 4096, dtype=torch.bfloat16), random(4, 4096, dtype=torch.bfloat16)
    expected = kernel.gate_residual_ada_norm(x, x, scale, scale, scale)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        actual = kernel.gate_residual_ada_norm(late, late, scale, scale, scale)
    stream.synchronize()
    assert all(torch.equal(a, e) for a, e in zip(actual, expected))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device():
    """The current device is not that of the tensors, and does not change."""
    tensors = random(3, 2, 8, 64, dtype=torch.float32)
    modulation = random(3, 2, 1, 64, dtype=torch.float32)
    here = [one.detach().requires_grad_() for one in (*tensors[:2], *modulation)]
    there = [one.detach().to("cuda:1").requires_grad_() for one in here]
    with torch.no_grad():
        for call in (kernel.gate_residual_ada_norm, lambda x, branch, *rest: (kernel.ada_layer_norm(x, *rest[1:]),)):
            for a, b in zip(call(*there), call(*here)):
                assert b.device.index == 0 and a.device.index == 1 and torch.equal(a.cpu(), b.cpu())
    ours = torch.autograd.grad(kernel.gate_residual_ada_norm(*there)[1].square().sum(), there)
    for a, b in zip(ours, torch.autograd.grad(kernel.gate_residual_ada_norm(*here)[1].square().sum(), here)):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-5, atol=1e-5)
    assert torch.cuda.current_device() == 0


@gpu
def test_graph():
    inputs = [random(2, 64, 1000, dtype=torch.float16, requires_grad=True) for _ in range(2)]
    inputs += leaves(*modulations("[B, C]", 2, 64, 1000, torch.float16, 3))
    grads = [random(2, 64, 1000, dtype=torch.float16) for _ in range(2)]

    def step():
        return torch.autograd.grad(kernel.gate_residual_ada_norm(*inputs), inputs, grads)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        inputs[0].copy_(random(2, 64, 1000, dtype=torch.float16))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step()))


@gpu
@pytest.mark.parametrize("hidden", [1152, 2048, 3072])
def test_large(hidden):
    x, branch = (random(2, 4096, hidden, dtype=torch.bfloat16) for _ in range(2))
    gate, scale, shift = modulations("[B, 1, C]", 2, 4096, hidden, torch.bfloat16, 3)
    total, normed = kernel.gate_residual_ada_norm(x, branch, gate, scale, shift)
    assert torch.equal(total, eager_gated(x, branch, gate))
    torch.testing.assert_close(normed, eager(total, scale, shift), rtol=8e-3, atol=1e-5)
    torch.testing.assert_close(kernel.ada_layer_norm(total, scale, shift), normed, rtol=8e-3, atol=1e-5)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(2, 40, 2048), (2, 700, 1024), (1, 1400, 1536), (2, 1024, 2048), (1, 6700, 2048), (2, 4500, 1152)]
)
def test_backward_of_more_and_more_to_read(shape, dtype):
    """Widths for which a block takes different numbers of rows at a time and loads different numbers ahead."""
    x, branch, grad, grad_sum = (random(*shape, dtype=dtype) for _ in range(4))
    for modulation_dtype in {dtype, torch.float32}:
        gate, scale, shift = leaves(*modulations("[B, C]", *shape, modulation_dtype, 3))
        weight = random(shape[-1], dtype=modulation_dtype, requires_grad=True)
        functions = [lambda *a, f=f: f(*a, None, EPS, False) for f in (ada_norm, eager, exact)]
        assert_gradients(*functions, [*leaves(x), scale, shift, weight], [grad])
        references = (fused(f, g, "layer") for f, g in ((eager, eager_gated), (exact, exact_gated)))
        inputs = [*leaves(x, branch), gate, scale, shift, weight]
        assert_gradients(kernel.gate_residual_ada_norm, *references, inputs, [grad_sum, grad])


@gpu
def test_more_elements_than_32_bits_count():
    hidden, rows = 4096, 2**19 + 3
    if torch.cuda.mem_get_info()[0] < 4 * 2 * hidden * rows:
        pytest.skip("needs 17 GB of GPU memory")
    x = torch.zeros(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    x[-1] = torch.arange(hidden, device=DEVICE) % 7
    scale, shift = random(2, hidden, dtype=torch.bfloat16)
    normed = kernel.ada_layer_norm(x, scale, shift)
    assert torch.equal(normed[0], shift)
    assert_as_good(normed[-1], eager(x[-1], scale, shift), exact(x[-1], scale, shift))
    assert torch.equal(kernel.gate_residual(x, x, scale)[-1], eager_gated(x[-1], x[-1], scale))
