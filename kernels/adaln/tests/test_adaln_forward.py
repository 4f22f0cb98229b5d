"""Compare results and gradients with float64."""

import pytest
import torch
import torch.nn.functional as F
from reference_adaln import (
    EPS,
    HIDDEN,
    LONG,
    MODULATIONS,
    ada_norm,
    eager,
    eager_gated,
    exact,
    exact_gated,
    fused,
    kernel,
    leaves,
    modulations,
    ops,
)
from testing import DEVICE, DTYPES, assert_accurate, assert_as_good, copies, gpu, random, results_and_gradients, views


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


def assert_accurate_sum(norm, residual, branch, gate, *arguments):
    """Compare a sum with and without its norm, which is that of the rounded sum, with the formulas."""
    if gate is None:
        total, normed = kernel.add_ada_norm(residual, branch, *arguments, eps=EPS, norm=norm)
        assert torch.equal(total, residual + branch)
    else:
        total, normed = kernel.gate_residual_ada_norm(residual, branch, gate, *arguments, eps=EPS, norm=norm)
        assert torch.equal(total, kernel.gate_residual(residual, branch, gate))
        assert_as_good(total, eager_gated(residual, branch, gate), exact_gated(residual, branch, gate))
    arguments = (total, *arguments, EPS, norm == "layer")
    assert_as_good(normed, eager(*arguments), exact(*arguments))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [*HIDDEN, LONG])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_sums(norm, hidden, dtype):
    """The gate may have another dtype than scale and shift, or weight and bias."""
    residual, branch = (random(2, 5, hidden, dtype=dtype) for _ in range(2))
    for norm_dtype in {dtype, torch.float32}:
        weight, bias = random(2, hidden, dtype=norm_dtype)
        for number, kind in enumerate(MODULATIONS):
            modulated = modulations(kind, 2, 5, hidden, norm_dtype)
            (gate,) = modulations(kind, 2, 5, hidden, (dtype, torch.float32)[number % 2], 1)
            for summand in (None, gate):
                assert_accurate_sum(norm, residual, branch, summand, *modulated, None, None)
        assert_accurate_sum(norm, residual, branch, gate, None, None, weight, bias)
        for given in ((*modulated, weight, bias), (None, None, weight, None), (None, None, None, bias), [None] * 4):
            assert_accurate_sum(norm, residual, branch, None, *given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_gate_for_rows_that_have_their_own_scale(dtype):
    residual, branch = (random(2, 5, 96, dtype=dtype, requires_grad=True) for _ in range(2))
    (gate,) = leaves(*modulations("[B, 1, C]", 2, 5, 96, dtype, 1))
    scale, shift = leaves(*modulations("[B, S, C]", 2, 5, 96, dtype))
    inputs = [residual, branch, gate, scale, shift]
    results = []
    for whole in (gate.expand(2, 5, 96), gate.expand(2, 5, 96).contiguous()):
        outputs = kernel.gate_residual_ada_norm(residual, branch, whole, scale, shift)
        results.append((*outputs, *torch.autograd.grad(outputs, inputs, outputs)))
    torch.testing.assert_close(*results)
    arguments = (None, branch, None, None, None, EPS, True, False, False, residual, branch, gate, True)
    torch.library.opcheck(ops.ada_norm_backward.default, arguments, test_utils="test_faketensor")


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("layer", "outlier"), [(True, 0), (True, 200), (False, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(512, 4096), (1000, 1000), (64, 30000)])
def test_error_over_many_rows(shape, dtype, layer, outlier):
    """Compare the mean error over many rows, which reveals a norm that is slightly wrong for a whole row."""
    x, scale, shift = random(1, *shape, dtype=dtype) + 3, *modulations("[B, C]", 1, 1, shape[-1], dtype)
    x[..., 0] += outlier  # to the element from which the CUDA kernels first take differences
    expected = exact(x, scale, shift, layer=layer)
    ours, eagers = ((f(x, scale, shift, layer=layer).double() - expected)[..., 1:].norm() for f in (ada_norm, eager))
    assert ours <= 1.1 * eagers


@pytest.mark.parametrize("hidden", [64, 3072, 20001])
def test_variance_of_a_row_far_from_zero(hidden):
    """A mean of squares minus the square of the mean would have no digits left."""
    x = random(4, hidden, dtype=torch.float32) + 10000
    torch.testing.assert_close(ada_norm(x, None, None).double(), exact(x, None, None), rtol=0, atol=2e-3)


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
    total, normed = kernel.add_ada_norm(x, branch, scale, shift, eps=EPS)
    assert torch.equal(total, x + branch)
    assert_neighbours(normed, (F.layer_norm(total.float(), (1536,), eps=EPS) * (1 + scale) + shift).to(dtype))
    for parameter_dtype in (dtype, torch.float32):
        w, b = weight.to(parameter_dtype), bias.to(parameter_dtype)
        total, normed = kernel.gate_residual_ada_norm(x, branch, gate, None, None, w, b, EPS)
        assert_neighbours(total, (x.float() + branch * gate).to(dtype))
        expected = F.layer_norm(total.float(), (1536,), w.float(), b.float(), EPS).to(dtype)
        assert_neighbours(normed, expected)


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
    both = kernel.add_ada_norm(x, branch, scale, shift, eps=EPS, norm="rms", rounding="each")
    assert torch.equal(both[0], x + branch)
    assert_neighbours(both[1], rms_norm(both[0]) * (1 + scale) + shift, shift)
    # LayerNorm with the same modulation: DiT, PixArt.
    normed = kernel.ada_layer_norm(x, scale, shift, eps=EPS, rounding="each")
    assert_neighbours(normed, F.layer_norm(x, (1536,), eps=EPS) * (1 + scale) + shift, shift)


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
        assert_accurate(*functions, [x, scale, shift], [random(6, 40, dtype=torch.float32)])


@pytest.mark.usefixtures("two_threads")
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
    grad = random(*shape, dtype=torch.float16)
    assert_accurate(ada_norm, eager, exact, [x, scale, shift], [grad])
    assert_accurate(kernel.gate_residual, eager_gated, exact_gated, [x, branch, gate], [grad], results=False)


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
                options = (EPS, True, True, True)
                actual = ops.ada_norm_backward(x, other, x, w, b, *options, other, x, other, True)
                y, z = copied[:2]
                expected = ops.ada_norm_backward(y, z, y, *copied[5:], *options, z, y, z, True)
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
            (kernel.add_ada_norm, (x, branch, scale, shift, w, b)),
            (kernel.add_ada_norm, (x, branch, None, None, w, b)),
            (kernel.ada_layer_norm, (x, scale, shift, w, b)),
            (kernel.ada_layer_norm, (x, None, None, w, b)),
            (kernel.gate_residual, (x, branch, gate)),
        ):
            given = [None if a is None else a.detach().requires_grad_() for a in arguments]
            copied = [None if a is None else a.detach().contiguous().requires_grad_() for a in arguments]
            results = (results_and_gradients(function, inputs, [x, x]) for inputs in (given, copied))
            for actual, expected in zip(*results):
                torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_rows_are_read_in_place():
    x, table = random(2, 64, 3, 256, dtype=torch.float32), random(2, 64, 6, 128, dtype=torch.float32)
    for modulation in (table[:, :, 2], table[:, :1, 5], table[:, 7, 1]):
        rows = x[:, :, 1, :128]
        assert not copies(lambda m=modulation, x=rows: kernel.gate_residual_ada_norm(x, x, m, m, m))


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
                assert_accurate(*functions, [x, scale, shift, None, None], [grad], results=False)
                assert_accurate(*functions, [x, scale, shift, weight, bias], [grad], results=False)
        assert_accurate(*functions, [x, None, None, weight, bias], [grad], results=False)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("has_gate", [True, False])
def test_backward_of_sums(has_gate, hidden, dtype):
    def exact_rounded(residual, branch, gate):
        total = exact_gated(residual, branch, gate)
        # The forward pass rounds the sum; its gradient is that of the rounded value.
        return total + (total.to(dtype).double() - total).detach()

    residual, branch = (random(2, 5, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    grads = [random(2, 5, hidden, dtype=dtype) for _ in range(2)]
    weight, bias = (random(hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    for norm in ("layer", "rms"):

        def ours(residual, branch, gate, *arguments, norm=norm):
            if has_gate:
                return kernel.gate_residual_ada_norm(residual, branch, gate, *arguments, EPS, norm)
            return kernel.add_ada_norm(residual, branch, *arguments, EPS, norm)

        references = fused(eager, eager_gated, norm), fused(exact, exact_rounded, norm)
        for kind in MODULATIONS:
            for modulation_dtype in {dtype} if has_gate else {dtype, torch.float32}:
                gate, scale, shift = leaves(*modulations(kind, 2, 5, hidden, modulation_dtype, 3))
                given = [residual, branch, gate if has_gate else None]
                for affine in ([None, None], [weight, bias]):
                    assert_accurate(ours, *references, [*given, scale, shift, *affine], grads, results=False)
            assert_accurate(ours, *references, [*given, None, None, weight, bias], grads, results=False)
            if has_gate and norm == "layer":
                assert_accurate(kernel.gate_residual, eager_gated, exact_gated, given, grads[:1], results=False)
        assert_accurate(ours, *references, [*given, None, None, None, None], grads, results=False)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kind", MODULATIONS)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 64), (1, 1, 1001), (1, 1, 3072), (1, 9000, 8), (1, 700, 64), (2, 900, 65), (3, 301, 136), (2, 150, 1000)],
)
def test_backward_of_one_and_of_many_rows(shape, kind):
    x, branch, grad = (random(*shape, dtype=torch.float32, requires_grad=True) for _ in range(3))
    gate, scale, shift = leaves(*modulations(kind, *shape, torch.float32, 3))
    weight, bias = (random(shape[-1], dtype=torch.float32, requires_grad=True) for _ in range(2))
    references = [fused(f, g, "layer") for f, g in ((eager, eager_gated), (exact, exact_gated))]
    inputs = [x, branch, gate, scale, shift, weight, bias]
    assert_accurate(kernel.gate_residual_ada_norm, *references, inputs, [grad, x.detach()], results=False)
    inputs[2] = None
    assert_accurate(kernel.gate_residual_ada_norm, *references, inputs, [grad, x.detach()], results=False)


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
        assert_accurate(*functions, [*leaves(x), scale, shift, weight], [grad], results=False)
        references = (fused(f, g, "layer") for f, g in ((eager, eager_gated), (exact, exact_gated)))
        inputs = [*leaves(x, branch), gate, scale, shift, weight]
        assert_accurate(kernel.gate_residual_ada_norm, *references, inputs, [grad_sum, grad], results=False)


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
