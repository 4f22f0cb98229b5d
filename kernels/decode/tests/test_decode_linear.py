"""Compare linear layers with float64."""

import pytest
import torch
import torch.nn.functional as F
from reference_decode import ACTIVATIONS, WIDTHS, eager_gated, eager_linear, eager_norm, kernel
from testing import DEVICE, DTYPES, assert_as_good, doubles, gpu, random

ROWS = range(1, 9)
# Outputs and inputs that an H200 computes by each plan, and by each cluster, if the weights are awaited.
PLANS = [*((outputs, 640) for outputs in (1056, 2112, 6208, 8448, 10560, 12688, 16912)), (1040, 384)]
PLANS += [(512, 4608), (1072, 4608), (2224, 3840), (2128, 6144), (4240, 7168)]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", WIDTHS)
def test_linear(inputs, dtype):
    for rows in ROWS:
        for outputs in (1, 5, 70, 1000, *((11000, 14000, 20000, 40000) if inputs == 4096 and rows == 8 else ())):
            x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype)
            bias, residual = random(outputs, dtype=dtype), random(rows, outputs, dtype=dtype)
            for arguments in ([x, weight], [x, weight, bias], [x, weight, None, residual], [x, weight, bias, residual]):
                out = kernel.linear(*arguments[:3], residual=arguments[3] if len(arguments) > 3 else None)
                assert_as_good(out, eager_linear(*arguments), eager_linear(*doubles(arguments)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", WIDTHS)
def test_linears(inputs, dtype):
    for rows in ROWS:
        x = random(rows, inputs, dtype=dtype)
        weights = [random(outputs, inputs, dtype=dtype) for outputs in (37, 1, 130)]
        biases = [random(37, dtype=dtype), None, random(130, dtype=dtype)]
        for count in (1, 2, 3):
            for given in (None, biases[:count]):
                out = kernel.linears(x, weights[:count], given)
                assert isinstance(out, tuple) and len(out) == count
                for i, part in enumerate(out):
                    assert torch.equal(part, kernel.linear(x, weights[i], None if given is None else given[i]))


@gpu
@pytest.mark.parametrize(("outputs", "inputs"), PLANS)
def test_weights_of_previous_kernel(outputs, inputs):
    """A layer whose weights the previous kernel writes waits for it: each plan of an H200."""
    rows, x = random(8, 64, dtype=torch.bfloat16), random(1, inputs, dtype=torch.bfloat16)
    for _ in range(40):
        weight = random(outputs * inputs // 8, 64, dtype=torch.bfloat16)
        written = kernel.linear(rows, weight, constant_weights=True).view(outputs, inputs)
        out = kernel.linear(x, written)
        assert_as_good(out, F.linear(x, written), x.double() @ written.double().T)


@gpu
def test_outputs_that_are_no_multiple_of_8():
    """The kernel computes them where an H200 calls cuBLAS for others: cuBLAS would take twice as long."""
    x, weight = random(8, 5960, dtype=torch.bfloat16), random(13572, 5960, dtype=torch.bfloat16)
    kernel.linear(x, weight)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        kernel.linear(x, weight)
        torch.cuda.synchronize()
    assert [event.key for event in profiled.key_averages() if "decode_step" in event.key]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_linear(dtype, activation):
    for inputs in WIDTHS:
        for rows in (1, 3, 8):
            weights = [random(75, inputs, dtype=dtype).div(inputs**0.5) for _ in range(2)]
            biases = [random(75, dtype=dtype) for _ in range(2)]
            for given in ((None, None), biases, (None, biases[1]), (biases[0], None)):
                arguments = [random(rows, inputs, dtype=dtype), *weights, *given]
                out = kernel.gated_linear(*arguments, activation=activation)
                assert_as_good(out, eager_gated(*arguments, activation), eager_gated(*doubles(arguments), activation))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("offset", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype, offset):
    """By the kernels, and by Torch operations: of many elements, of more than eight rows, and for gradients."""
    for inputs in WIDTHS:
        for rows in (1, 3, 8, 9):
            whole = random(2 * 80 * inputs + 1, dtype=dtype).div(inputs**0.5)
            for weights in (whole[:-1].view(2, 80, inputs), whole[1:].view(80, 2, inputs).transpose(0, 1)):
                x, norm, bias = random(rows, inputs, dtype=dtype) * 3, random(2 * inputs, dtype=dtype)[::2], whole[:80]
                residual = random(rows, 80, dtype=dtype)
                arguments = (x, *weights, norm, bias, residual)
                expected = [_normed(eager_norm, *given, offset) for given in (arguments, doubles(arguments))]
                options = {"norm": (norm, 1e-5, offset), "constant_weights": rows == 3}
                results = (
                    kernel.linear(x, weights[0], bias, residual=residual, **options),
                    *kernel.linears(x, list(weights), **options),
                    kernel.gated_linear(x, *weights, None, bias, **options),
                )
                for result, *others in zip(results, *expected):
                    assert_as_good(result, *others, factor=3)
                one = x.new_empty(1, inputs + 3)[:, :inputs].copy_(weights[0][:1])  # a row with a stride of its own
                both = [kernel.linear(x, weight, norm=(norm, 1e-5, offset)) for weight in (one, one.ravel()[None])]
                assert torch.equal(*both)
                trained = norm.clone().requires_grad_()
                out = kernel.linear(x, weights[0], norm=(trained, 1e-5, offset))
                assert out.requires_grad
                assert_as_good(out.detach(), expected[0][1], expected[1][1], factor=3)


def _normed(norm, x, weight, other, norm_weight, bias, residual, offset):
    x = norm(x, norm_weight, 1e-5, offset)
    products = eager_linear(x, weight), eager_linear(x, other)
    return eager_linear(x, weight, bias, residual), *products, eager_gated(x, weight, other, None, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_weights(dtype):
    """Weights may be read early, but not x: each product reads the one before. A strided weight is copied."""
    whole = random(256, 512, dtype=dtype).div(64)
    for weight in (whole[:, :256], whole[:, ::2]):
        start = random(3, 256, dtype=dtype)
        results = []
        for constant in (False, True):
            x = start
            for _ in range(10):
                x = kernel.linear(x, weight, weight[0], residual=start, constant_weights=constant)
                x = kernel.gated_linear(x, weight, weight, activation="gelu", constant_weights=constant)
                x = kernel.linears(x, [weight, weight[:5]], constant_weights=constant)[0]
                x = kernel.linears(x, [weight], constant_weights=constant)[0]
            results.append(x)
        assert results[0].isfinite().all() and torch.equal(*results)


def test_far_gates():
    """Gates at which an exponential overflows or a gelu is a tiny difference."""
    values = torch.tensor([[-200.0, -90.0, -20.0, -5.0, 0.0, 5.0, 90.0, 200.0]], device=DEVICE)
    gate, up, x = values.T.contiguous(), torch.ones(8, 1, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    for activation in ACTIVATIONS:
        expected = eager_gated(*doubles([x, gate, up]), activation=activation)
        actual = kernel.gated_linear(x, gate, up, activation=activation)
        torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=1e-6)


def assert_same_sums(actual, expected):
    """Equal to the bit on the CPU. On a GPU rows that are not aligned are added in another order."""
    if DEVICE == "cpu" or actual.dtype != torch.float32:
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided(dtype):
    """Halves of a joined projection, unaligned rows, and copied inputs."""
    whole = random(60, 2 * 104 + 1, dtype=dtype)
    for inputs in (104, 8, 13):
        x = random(3, inputs, dtype=dtype)
        for weight in (
            whole[:30, :inputs],
            whole[30:, 104 : 104 + inputs],
            whole[::2, 1 : inputs + 1],
            whole[:1, :inputs].expand(9, inputs),
            random(inputs, 40, dtype=dtype).t(),
        ):
            bias = random(2 * weight.shape[0], dtype=dtype)[::2]
            residual = random(weight.shape[0], 3, dtype=dtype).t()
            strided = random(inputs, 3, dtype=dtype).t()
            for values in (x, strided, x[:1].expand(3, inputs)):
                actual = kernel.linear(values, weight, bias, residual=residual)
                same = [tensor.contiguous() for tensor in (values, weight, bias, residual)]
                assert_same_sums(actual, kernel.linear(*same[:3], residual=same[3]))
                gated = kernel.gated_linear(values, weight, weight.flip(0), bias, bias)
                assert_same_sums(gated, kernel.gated_linear(*same[:2], same[1].flip(0), *same[2:3] * 2))


def test_shapes():
    weight = random(24, 16, dtype=torch.float32)
    for shape in ((16,), (1, 1, 16), (2, 4, 16), (8, 1, 1, 16), (0, 16), (3, 0, 16)):
        x = random(*shape, dtype=torch.float32)
        assert kernel.linear(x, weight).shape == (*shape[:-1], 24)
        assert [part.shape for part in kernel.linears(x, [weight, weight[:4]])] == [(*shape[:-1], n) for n in (24, 4)]
        assert kernel.gated_linear(x, weight, weight).shape == (*shape[:-1], 24)
        torch.testing.assert_close(kernel.linear(x, weight), F.linear(x, weight))
    assert kernel.linear(x[:1, :1], weight[:0]).shape == (1, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_by_torch(dtype):
    """More rows, autocast, and tensors that need a gradient or have a tangent."""
    x, weight, up, bias = (random(*shape, dtype=dtype) for shape in ((9, 40), (24, 40), (24, 40), (24,)))
    residual = random(9, 24, dtype=dtype)
    assert torch.equal(kernel.linear(x, weight, bias, residual=residual), F.linear(x, weight, bias) + residual)
    with pytest.raises(RuntimeError, match=r"decode: residual must have shape \[9, 24\], not \[24\]"):
        kernel.linear(x, weight, residual=bias)
    assert torch.equal(kernel.gated_linear(x, weight, up), eager_gated(x, weight, up))
    for part, single in zip(kernel.linears(x, [weight, up]), (weight, up)):
        assert torch.equal(part, F.linear(x, single))
    x = x[:3]
    with torch.autocast(DEVICE, torch.bfloat16):
        out = kernel.linear(x, weight)
        assert out.dtype == torch.bfloat16 and torch.equal(out, F.linear(x, weight))
    weight.requires_grad_()
    with torch.no_grad():
        assert not kernel.linear(x, weight).requires_grad
    for out, expected in (
        (kernel.linear(x, weight, bias), eager_linear(x, weight, bias)),
        (kernel.linears(x, (up, weight))[1], eager_linear(x, weight)),
        (kernel.gated_linear(x, weight, up, activation="gelu"), eager_gated(x, weight, up, activation="gelu")),
    ):
        grads = [torch.autograd.grad(each.float().square().sum(), weight)[0] for each in (out, expected)]
        assert torch.equal(*grads)


def test_transforms():
    x, weight, up = (random(*shape, dtype=torch.float32) for shape in ((3, 40), (24, 40), (24, 40)))
    for function, eager in (
        (kernel.linear, eager_linear),
        (lambda x, w: kernel.gated_linear(x, w, up), lambda x, w: eager_gated(x, w, up)),
        (lambda x, w: kernel.linears(x, [up, w], None)[1], eager_linear),
    ):
        for argument in (0, 1):
            grads = [
                torch.func.grad(lambda *a, f=f: f(*a).square().sum(), argument)(x, weight) for f in (function, eager)
            ]
            torch.testing.assert_close(*grads)
            tangents = [torch.zeros_like(x), torch.zeros_like(weight)]
            tangents[argument] = torch.randn_like(tangents[argument])
            results = [torch.func.jvp(f, (x, weight), tuple(tangents)) for f in (function, eager)]
            torch.testing.assert_close(*results)
        stacked = weight.expand(4, 24, 40) * torch.arange(4, device=DEVICE)[:, None, None]
        results = [torch.func.vmap(f, in_dims=(None, 0))(x, stacked) for f in (function, eager)]
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)  # other orders of float32 sums
