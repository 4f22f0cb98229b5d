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
# One element, less and more than a vector, odd, not a multiple of a vector, several rows per warp and per block, and
# rows longer than the registers hold.
HIDDEN = [1, 3, 8, 17, 64, 100, 128, 768, 1000, 2048, 4096, 5000, 5001, 16384, 20001, 70000]

kernel = get_local_kernel(PROJECT)
ops = kernel._ops.ops


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype, requires_grad=False):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_(requires_grad)


def exact(x, weight=None, eps=EPS, offset=0.0, rounding="last"):
    """Return the RMSNorm in float64."""
    x = x.double()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (offset + weight.double())


def eager(x, weight=None, eps=EPS, offset=0.0, rounding="last"):
    """Return what models compute: in float32, rounded once as in Gemma, or before the weight as in Llama."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if rounding == "last":
        return (normed * (offset + weight.float())).to(x.dtype)
    return ((offset + weight.float()) * normed.to(x.dtype)).to(torch.promote_types(x.dtype, weight.dtype))


def gradients_of_rows(grad, x, weight, grad_sum, offset=0.0):
    return ops.rms_norm_backward(grad, x, weight, grad_sum, EPS, offset, weight is not None)


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
    return torch.autograd.grad(outputs, inputs, [g.to(o.dtype) for g, o in zip(grads, outputs)])


def assert_gradients(function, eager_function, exact_function, inputs, grads):
    expected = gradients(exact_function, [i.detach().double().requires_grad_() for i in inputs], grads)
    reference = gradients(eager_function, inputs, grads)
    actual = gradients(function, inputs, grads)
    for a, r, e in zip(actual, reference, expected):
        assert_as_good(a, r, e)


# --- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_forward(hidden, dtype):
    x = random(5, hidden, dtype=dtype)
    for weight in (None, random(hidden, dtype=dtype), random(hidden, dtype=torch.float32)):
        normed = kernel.rms_norm(x, weight, EPS)
        assert normed.is_contiguous()
        assert_as_good(normed, eager(x, weight), exact(x, weight))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_add_forward(hidden, dtype):
    x, residual, weight = random(5, hidden, dtype=dtype), random(5, hidden, dtype=dtype), random(hidden, dtype=dtype)
    normed, total = kernel.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert_as_good(normed, eager(total, weight), exact(total, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(512, 4096), (2000, 1000), (1100, 9000), (64, 30000)])
def test_error_over_many_rows(shape, dtype):
    """The mean error over many rows, in which chance does not hide a norm that is wrong for a whole row."""
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    expected = exact(x, weight)
    ours = (kernel.rms_norm(x, weight, EPS).double() - expected).norm()
    assert ours <= 1.1 * (eager(x, weight).double() - expected).norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(512, 2048), (8192, 128), (32768, 64)])
def test_error_of_gradients_over_many_rows(shape, dtype):
    """The weight's gradient is a sum over rows; the rounding errors of a sequential sum would add up."""
    inputs = [random(*s, dtype=dtype, requires_grad=True) for s in (shape, shape[-1:])]
    grads = [random(*shape, dtype=dtype)]
    expected = gradients(exact, [i.detach().double().requires_grad_() for i in inputs], grads)
    for ours, theirs, right in zip(
        gradients(kernel.rms_norm, inputs, grads), gradients(eager, inputs, grads), expected
    ):
        assert (ours.double() - right).norm() <= 1.1 * (theirs.double() - right).norm()


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_eps(eps):
    x, weight = (random(*shape, dtype=torch.float32, requires_grad=True) for shape in ((6, 40), (40,)))
    grad = random(6, 40, dtype=torch.float32)
    total = kernel.add_rms_norm(x, x, weight, eps)[0]
    assert_as_good(kernel.rms_norm(x, weight, eps), eager(x, weight, eps), exact(x, weight, eps))
    assert_as_good(total, eager(x + x, weight, eps), exact(x + x, weight, eps))
    functions = [lambda x, weight, f=f: f(x, weight, eps) for f in (kernel.rms_norm, eager, exact)]
    assert_gradients(*functions, [x, weight], [grad])


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3000, 64), (2, 3, 5, 7, 96), (1025, 1), (300, 200)])
def test_shapes(shape):
    x, weight = random(*shape, dtype=torch.float16), random(shape[-1], dtype=torch.float16)
    assert_as_good(kernel.rms_norm(x, weight), eager(x, weight), exact(x, weight))


def views(hidden, dtype):
    """Return tensors whose rows are not contiguous, by name."""
    x = random(4, 6, 5, hidden + 8, dtype=dtype)
    deep = random(3, 3, 3, 3, 3, 2 * hidden, dtype=dtype)
    return {
        "slice of each row": x[..., :hidden],
        "slice at an odd offset": x[..., 1 : hidden + 1],
        "every second row": x[:, :, ::2, :hidden],
        "permuted": x[..., :hidden].permute(2, 0, 1, 3),
        "leading dimensions that do not fold": x[:3, 1:5, :4, 8:],
        "more of them than are read in place": deep.permute(4, 2, 0, 1, 3, 5)[..., :hidden],
        "expanded rows": random(1, hidden, dtype=dtype).expand(7, hidden),
        "expanded elements": random(7, 1, dtype=dtype).expand(7, hidden),
        "elements apart": random(hidden, 9, dtype=dtype).t(),
        "odd storage offset": random(6 * hidden + 1, dtype=dtype)[1:].view(6, hidden),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [33, 64, 1001])
def test_strides(hidden, dtype):
    weight = random(2 * hidden, dtype=dtype)
    for name, x in views(hidden, dtype).items():
        other = random(*x.shape[::-1], dtype=dtype).permute(*reversed(range(x.dim())))
        for w in (weight[:hidden], weight[::2], weight[1 : hidden + 1]):
            expected = kernel.rms_norm(x.contiguous(), w.contiguous())
            torch.testing.assert_close(kernel.rms_norm(x, w), expected, rtol=1e-2, atol=1e-2, msg=name)
            assert_as_good(kernel.rms_norm(x, w), eager(x, w), exact(x, w))
        normed, total = kernel.add_rms_norm(x, other, w)
        assert torch.equal(total, x + other), name
        assert_as_good(normed, eager(total, w), exact(total, w))
        grad_x, grad_weight = gradients_of_rows(other, x, w, x)
        same_x, same_weight = gradients_of_rows(other.contiguous(), x.contiguous(), w, x.contiguous())
        torch.testing.assert_close(grad_x, same_x, msg=name)
        torch.testing.assert_close(grad_weight, same_weight, msg=name)


def copies(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events()} & {"aten::clone", "aten::contiguous", "aten::copy_"}


def test_rows_are_read_in_place():
    storage = random(64, 3, 256, dtype=torch.float32)
    assert not copies(lambda: kernel.rms_norm(storage[:, 1:, :128]))
    assert copies(lambda: kernel.rms_norm(storage[:, :, ::2]))


@pytest.mark.parametrize("shape", [(0, 64), (4, 0, 64), (4, 0), (0,), (0, 0)])
def test_empty(shape):
    x, weight = random(*shape, dtype=torch.float16), random(shape[-1], dtype=torch.float16)
    assert kernel.rms_norm(x, weight).shape == shape
    assert [t.shape for t in kernel.add_rms_norm(x, x, weight)] == [shape, shape]
    x.requires_grad_()
    weight.requires_grad_()
    kernel.rms_norm(x, weight).sum().backward()
    assert x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("hidden", [17, 64])
def test_not_finite(hidden, value, dtype):
    x = random(3, hidden, dtype=dtype)
    x[1, 5] = value
    assert torch.allclose(kernel.rms_norm(x), eager(x), rtol=1e-2, atol=1e-2, equal_nan=True)
    normed, total = kernel.add_rms_norm(x, x)
    assert torch.allclose(total, x + x, equal_nan=True)
    assert torch.allclose(normed, eager(total), rtol=1e-2, atol=1e-2, equal_nan=True)


def test_every_float16():
    """Every float16 value is read and written exactly: rows of one element, scaled back by a weight."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).to(DEVICE)
    zeros = torch.zeros_like(halves)
    assert torch.equal(
        kernel.add_rms_norm(halves[None], zeros[None])[1].nan_to_num(7), (halves + 0)[None].nan_to_num(7)
    )
    wide = torch.cat([halves.float() * f for f in (1 / 3, 1, 1.0004884, 1.5, 1e-3)]).nan_to_num(1.0)
    rounded = kernel.rms_norm(torch.ones(1, wide.numel(), device=DEVICE, dtype=torch.float16), wide, eps=0.0)
    assert torch.equal(rounded[0], wide.to(torch.float16))


# --- backward --------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(5, h) for h in HIDDEN]
    + [(1, 64), (700, 64), (2, 150, 136), (300, 1000)]
    # Rows that are no multiple of a vector: as many rows as repeat an alignment, fewer and more, down to one.
    + [(1, 4097), (2, 8191), (7, 65), (8, 1002), (9, 1001), (300, 4095), (700, 63), (2000, 7)],
)
def test_backward(shape, dtype):
    x = random(*shape, dtype=dtype, requires_grad=True)
    grad = random(*shape, dtype=dtype)
    assert_gradients(kernel.rms_norm, eager, exact, [x], [grad])
    for weight_dtype in {dtype, torch.float32}:
        weight = random(shape[-1], dtype=weight_dtype, requires_grad=True)
        assert_gradients(kernel.rms_norm, eager, exact, [x, weight], [grad])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("hidden", [1, 33, 128, 1001, 4096, 20001])
def test_add_backward(hidden, rows, dtype):
    x, residual = (random(rows, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = random(hidden, dtype=dtype, requires_grad=True)
    assert_add_gradients(x, residual, weight, [random(rows, hidden, dtype=dtype) for _ in range(2)])


def assert_add_gradients(x, residual, weight, grads):

    def eager_add(x, residual, weight):
        total = x + residual
        return eager(total, weight), total

    def exact_add(x, residual, weight):
        total = x + residual
        # The forward pass rounds the sum; its gradient is that of the rounded value.
        total = total + (total.to(grads[0].dtype).double() - total).detach()
        return exact(total, weight), total

    assert_gradients(kernel.add_rms_norm, eager_add, exact_add, [x, residual, weight], grads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [3, 65, 1002, 4097])
def test_a_row_knows_nothing_of_its_neighbours(hidden, dtype):
    """Memory beside the rows may share vectors with them and hold NaN, and must not change the result."""
    x, grad, grad_sum = (random(700, hidden, dtype=dtype) for _ in range(3))
    weight = random(hidden, dtype=dtype)
    expected, _ = gradients_of_rows(grad, x, weight, grad_sum)
    bad = torch.arange(700, device=DEVICE) % 3 == 0
    for tensor, value in ((x, float("nan")), (grad, float("inf")), (grad_sum, float("nan"))):
        given = tensor.clone()
        tensor[bad] = value
        actual, _ = gradients_of_rows(grad, x, weight, grad_sum)
        assert torch.equal(actual[~bad], expected[~bad])
        assert not actual[bad].isfinite().any()
        tensor.copy_(given)


def test_only_what_needs_a_gradient_gets_one():
    x, weight = random(4, 64, dtype=torch.float32), random(64, dtype=torch.float32)
    assert not kernel.rms_norm(x, weight).requires_grad
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(kernel.rms_norm(x, weight).sum(), weight)
    expected = exact(x).sum(0).float()
    torch.testing.assert_close(grad, expected)
    with torch.no_grad():
        assert not kernel.rms_norm(x, weight).requires_grad


@pytest.mark.parametrize("used", [0, 1])
def test_gradient_through_one_of_two_results(used):
    x, residual = (random(4, 64, dtype=torch.float32, requires_grad=True) for _ in range(2))
    weight = random(64, dtype=torch.float32, requires_grad=True)

    def by_hand(x, residual, weight):
        total = x + residual
        return eager(total, weight), total

    expected, actual = (f(x, residual, weight)[used].sum() for f in (by_hand, kernel.add_rms_norm))
    for inputs in ([x], [residual], [x, residual]):
        a = torch.autograd.grad(actual, inputs, retain_graph=True)
        torch.testing.assert_close(a, torch.autograd.grad(expected, inputs, retain_graph=True))


def test_gradients_are_equal_to_the_bit():
    x, weight = random(1000, 520, dtype=torch.bfloat16), random(520, dtype=torch.float32)
    first = gradients_of_rows(x, x, weight, None)
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        again = gradients_of_rows(x, x, weight, None)
        torch.set_num_threads(before)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_second_derivative_is_refused():
    x = random(2, 8, dtype=torch.float32, requires_grad=True)
    (grad,) = torch.autograd.grad(kernel.rms_norm(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second time"):
        grad.sum().backward()


# --- models ----------------------------------------------------------------------------------------------------------


def assert_within_one_unit(actual, expected):
    """Assert that each element equals its counterpart or is the next number of the dtype."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bits = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}[actual.dtype]
    # Negative numbers count downwards from the smallest integer.
    a, e = (torch.where(b < 0, torch.iinfo(bits).min - b, b).long() for b in (actual.view(bits), expected.view(bits)))
    assert (a - e).abs().max() <= 1


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rounding", ["last", "before_weight"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", [1, 100, 128, 1001, 4096, 20001])
def test_rounding(hidden, dtype, offset, rounding):
    """The result equals that of a model's code up to one unit, which the last bit of the square root may cost.

    A float32 sum may differ from another by more units of its own: float32 is tested against float64.
    """
    x, residual = random(7, hidden, dtype=dtype), random(7, hidden, dtype=dtype)
    for weight in (random(hidden, dtype=dtype), random(hidden, dtype=torch.float32), None):
        options = {"eps": EPS, "offset": offset, "rounding": rounding}
        expected = eager(x, weight, **options)
        normed = kernel.rms_norm(x, weight, **options)
        if expected.dtype == torch.float32:  # an intermediate is rounded to `dtype`: one unit of that
            unit = torch.finfo(dtype).eps * expected.abs()
            assert normed.dtype == torch.float32 and ((normed - expected).abs() <= unit).all()
        else:
            # A unit of the inner rounding may be two of the outer.
            assert_within_one_unit(normed, expected) if rounding == "last" else assert_as_good(
                normed, expected, exact(x, weight, **options)
            )
        assert (normed == expected).float().mean() > 0.98
        again, total = kernel.add_rms_norm(x, residual, weight, **options)
        assert torch.equal(total, x + residual)
        assert torch.equal(again, kernel.rms_norm(total, weight, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [33, 128, 5000])
@pytest.mark.parametrize("rounding", ["last", "before_weight"])
def test_gradients_with_options(hidden, rounding, dtype):
    options = {"eps": EPS, "offset": 1.0, "rounding": rounding}
    for weight_dtype in {dtype, torch.float32}:
        x, residual = (random(9, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
        weight = random(hidden, dtype=weight_dtype, requires_grad=True)
        grads = [random(9, hidden, dtype=dtype) for _ in range(2)]
        functions = [lambda x, w, f=f: f(x, w, **options) for f in (kernel.rms_norm, eager, exact)]
        assert_gradients(*functions, [x, weight], grads[:1])

        def added(function, x, residual, weight):
            total = x + residual
            if total.dtype == torch.float64:
                total = total + (total.to(dtype).double() - total).detach()
            return function(total, weight, **options), total

        functions = [
            lambda x, r, w: kernel.add_rms_norm(x, r, w, **options),
            lambda x, r, w: added(eager, x, r, w),
            lambda x, r, w: added(exact, x, r, w),
        ]
        assert_gradients(*functions, [x, residual, weight], grads)


def test_unknown_rounding_is_refused():
    x = random(2, 8, dtype=torch.float32)
    for call in (
        lambda: kernel.rms_norm(x, rounding="first"),
        lambda: kernel.add_rms_norm(x, x, rounding="first"),
        lambda: kernel.add_rms_norm_(x, x.clone(), rounding="first"),
    ):
        with pytest.raises(ValueError, match="rounding must be"):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads(dtype):
    """q and k as [B, S, heads, head_dim], and its transpose, are read in place."""
    heads = random(2, 50, 6, 128, dtype=dtype)
    weight = random(128, dtype=dtype)
    transposed = heads.transpose(1, 2)
    expected = kernel.rms_norm(heads, weight, rounding="before_weight")
    for part in (slice(None), slice(0, 4), slice(4, 6)):  # q, k and v from one projection
        normed = kernel.rms_norm(heads[:, :, part], weight, rounding="before_weight")
        assert torch.equal(normed, expected[:, :, part]) and normed.is_contiguous()
    normed = kernel.rms_norm(transposed, weight, rounding="before_weight")
    assert torch.equal(normed, expected.transpose(1, 2)) and normed.is_contiguous()
    for x in (heads, heads[:, :, :4], transposed, transposed[:, :4], transposed[:, :, 1::2]):
        assert not copies(lambda x=x: kernel.rms_norm(x, weight))
        assert not copies(lambda x=x: gradients_of_rows(x, x, weight, None))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [33, 128, 5000, 20001])
def test_in_place(hidden, dtype):
    weight = random(hidden, dtype=dtype)
    for rounding in ("last", "before_weight"):
        x, wide = random(6, 5, hidden, dtype=dtype), random(5, 6, hidden + 3, dtype=dtype)
        residual = wide.transpose(0, 1)[..., 1 : hidden + 1]  # strided, unaligned rows
        beside = wide[..., hidden + 1 :].clone(), wide[..., :1].clone()
        normed, total = kernel.add_rms_norm(x, residual, weight, EPS, rounding=rounding)
        version = x._version
        assert kernel.add_rms_norm_(x, residual, weight, EPS, rounding=rounding) is None
        assert torch.equal(x, normed) and torch.equal(residual, total)
        assert torch.equal(wide[..., hidden + 1 :], beside[0]) and torch.equal(wide[..., :1], beside[1])
        assert x._version > version  # autograd sees the change
    kernel.add_rms_norm_(x[:0], residual[:0], weight)


def test_in_place_refuses_what_it_cannot_write():
    x, weight = random(4, 8, dtype=torch.float16), random(8, dtype=torch.float16)
    for argument, tensor in (("x", x[:1].expand(4, 8)), ("x", random(8, 4, dtype=torch.float16).t())):
        with pytest.raises(RuntimeError, match=f"{argument} must .* changed in place"):
            kernel.add_rms_norm_(tensor, x, weight)
        with pytest.raises(RuntimeError, match=r"residual must .* changed in place"):
            kernel.add_rms_norm_(x, tensor, weight)
    with pytest.raises(RuntimeError, match="weight must have the dtype of x"):
        kernel.add_rms_norm_(x, x.clone(), weight.float(), rounding="before_weight")
    with pytest.raises(NotImplementedError, match="has no gradient"):
        kernel.add_rms_norm_(x, x.clone(), weight.requires_grad_())


# --- errors ----------------------------------------------------------------------------------------------------------

OTHER_DEVICE = "cpu" if DEVICE == "cuda" else "meta"


@pytest.mark.kernels_ci
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("x must be float32, float16 or bfloat16", {"x": torch.zeros(2, 8, dtype=torch.float64)}),
        ("x must have at least one dimension", {"x": torch.zeros(())}),
        (r"weight must have shape \[8\], not \[7\]", {"weight": torch.zeros(7)}),
        (r"weight must have shape \[8\], not \[1, 8\]", {"weight": torch.zeros(1, 8)}),
        ("weight must have the dtype of x, or float32", {"weight": torch.zeros(8, dtype=torch.float16)}),
        (r"residual must have shape \[2, 8\], not \[8\]", {"residual": torch.zeros(8)}),
        ("residual must have the dtype of x", {"residual": torch.zeros(2, 8, dtype=torch.bfloat16)}),
    ],
)
def test_errors_name_the_argument(message, arguments, fake):
    device = "meta" if fake else DEVICE
    given = {"x": torch.zeros(2, 8), "residual": torch.zeros(2, 8), "weight": torch.zeros(8), **arguments}
    given = {name: tensor.to(device) for name, tensor in given.items()}
    function = kernel.add_rms_norm
    if "residual" not in arguments:
        del given["residual"]
        function = kernel.rms_norm
    with pytest.raises(RuntimeError, match=message):
        function(**given)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: it uses two devices")
def test_errors_name_the_argument_on_another_device():
    x, weight = torch.zeros(2, 8, device="cuda"), torch.zeros(8)
    with pytest.raises(RuntimeError, match="weight must be on the device of x"):
        kernel.rms_norm(x, weight)
    with pytest.raises(RuntimeError, match="residual must be on the device of x"):
        kernel.add_rms_norm(x, x.cpu())
    with pytest.raises(RuntimeError, match="x must be on a CUDA device"):
        kernel.rms_norm(x.cpu(), weight.cuda())


# --- torch.library, torch.compile, kernelize -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    x, y = (random(3, 5, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    weight = random(24, dtype=dtype, requires_grad=True)
    strided = random(3, 24, 5, dtype=dtype).transpose(1, 2)
    for w, offset, before in ((None, 0.0, False), (weight, 0.0, True), (weight.float().detach(), 1.0, True)):
        torch.library.opcheck(ops.rms_norm.default, (x, w, EPS, offset, before))
        torch.library.opcheck(ops.rms_norm.default, (strided, w, EPS, offset, before))
        torch.library.opcheck(ops.add_rms_norm.default, (x, y, w, EPS, offset, before))
        for grad_sum in (None, y.detach()):
            arguments = (x.detach(), y.detach(), w if w is None else w.detach(), grad_sum, EPS, offset, w is not None)
            torch.library.opcheck(ops.rms_norm_backward.default, arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_in_place(dtype):
    weight = random(24, dtype=dtype)
    for w, before in ((None, False), (weight, True)):
        x, residual = random(3, 5, 24, dtype=dtype), random(5, 3, 24, dtype=dtype).transpose(0, 1)
        torch.library.opcheck(ops.add_rms_norm_.default, (x, residual, w, EPS, 0.0, before))


@pytest.mark.kernels_ci
def test_compile():
    def block(x, residual, weight):
        normed, total = kernel.add_rms_norm(x * 2, residual, weight)
        return kernel.rms_norm(normed, weight) + total

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = random(48, dtype=torch.float32, requires_grad=True)
    for batch in (4, 9):
        with torch.compiler.set_stance("fail_on_recompile" if batch == 9 else "default"):
            x, residual = (random(batch, 3, 48, dtype=torch.float32, requires_grad=True) for _ in range(2))
            expected = block(x, residual, weight)
            actual = compiled(x, residual, weight)
            torch.testing.assert_close(actual, expected)
            grad = torch.randn_like(expected)
            inputs = (x, residual, weight)
            torch.testing.assert_close(
                torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad)
            )


@pytest.mark.kernels_ci
def test_compile_in_place():
    def block(x, residual, weight):
        x, residual = x * 2, residual * 3
        kernel.add_rms_norm_(x, residual, weight, EPS)
        kernel.add_rms_norm_(x, residual, None, EPS)
        return x, residual

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = random(48, dtype=torch.float32)
    for batch in (4, 9):
        with torch.compiler.set_stance("fail_on_recompile" if batch == 9 else "default"):
            x, residual = (random(batch, 3, 48, dtype=torch.float32) for _ in range(2))
            torch.testing.assert_close(compiled(x, residual, weight), block(x, residual, weight))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the CPU runs compile another backend")
def test_compile_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: kernel.rms_norm(x + 1, w) * 2, fullgraph=True, dynamic=True)
    weight = random(256, dtype=torch.bfloat16)
    for batch in (4, 9):
        x = random(batch, 256, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x, weight), kernel.rms_norm(x + 1, weight) * 2)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [None, 0.5])
def test_layer(eps, affine):
    layer = use_kernel_forward_from_hub("RMSNorm")(
        type("Norm", (torch.nn.RMSNorm,), {})
    )  # a new class, because marking changes it
    model = torch.nn.Sequential(layer(48, eps=eps, elementwise_affine=affine), torch.nn.Linear(48, 8)).to(DEVICE)
    x = random(5, 48, dtype=torch.float32)
    expected = model(x)
    mapping = {"RMSNorm": {DEVICE: LocalLayerRepository(PROJECT, layer_name="RMSNorm")}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=DEVICE, use_fallback=False)
    assert model[0].forward.__func__ is kernel.layers.RMSNorm.forward
    torch.testing.assert_close(model(x), expected)


class LlamaNorm(torch.nn.Module):
    """The norm of transformers."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        normed = hidden_states.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(hidden_states.dtype)


class Olmo2Norm(LlamaNorm):
    def forward(self, hidden_states):
        normed = hidden_states.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * normed).to(hidden_states.dtype)


class GemmaNorm(torch.nn.Module):
    """The norm of transformers."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size))
        self.eps = eps

    def forward(self, x):
        normed = x.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class DiffusersNorm(torch.nn.Module):
    """The norm of diffusers."""

    def __init__(self, size, eps=1e-6, affine=True, bias=False):
        super().__init__()
        self.eps, self.dim = eps, torch.Size([size])
        self.weight = torch.nn.Parameter(torch.randn(size)) if affine else None
        self.bias = torch.nn.Parameter(torch.randn(size)) if bias else None

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        if self.weight is None:
            return hidden_states.to(input_dtype)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        hidden_states = hidden_states * self.weight
        return hidden_states if self.bias is None else hidden_states + self.bias


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    ("layer", "norm", "options"),
    [
        ("LlamaRMSNorm", LlamaNorm, {}),
        ("LlamaRMSNorm", LlamaNorm, {"eps": 0.5}),
        ("Olmo2RMSNorm", Olmo2Norm, {}),
        ("GemmaRMSNorm", GemmaNorm, {}),
        ("DiffusersRMSNorm", DiffusersNorm, {}),
        ("DiffusersRMSNorm", DiffusersNorm, {"bias": True}),
        ("DiffusersRMSNorm", DiffusersNorm, {"affine": False}),
    ],
)
def test_layers_of_models(layer, norm, options):
    marked = use_kernel_forward_from_hub("RMSNorm")(type("RMSNorm", (norm,), {}))
    mapping = {"RMSNorm": {DEVICE: LocalLayerRepository(PROJECT, layer_name=layer)}}
    for weight_dtype in DTYPES:
        model = torch.nn.Sequential(marked(64, **options)).to(DEVICE, weight_dtype)
        inputs = [random(2, 5, 64, dtype=dtype, requires_grad=True) for dtype in DTYPES]
        expected = [model(x) for x in inputs]
        with use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=DEVICE, use_fallback=False)
        assert model[0].forward.__func__ is getattr(kernel.layers, layer).forward
        for x, e in zip(inputs, expected):
            actual = model(x)
            # An intermediate of a float32 result may have been rounded to 16 bits.
            unit = max(torch.finfo(x.dtype).eps, 1e-6) if e.dtype == torch.float32 else None
            torch.testing.assert_close(actual, e, rtol=unit, atol=unit)
            wanted = [x, *model.parameters()]
            grad = torch.randn_like(e)
            torch.testing.assert_close(
                torch.autograd.grad(actual, wanted, grad), torch.autograd.grad(e, wanted, grad), rtol=0.05, atol=0.05
            )


def test_layer_refuses_more_than_one_dimension():
    norm = torch.nn.RMSNorm((4, 8), elementwise_affine=False)
    with pytest.raises(ValueError, match="normalized_shape"):
        kernel.layers.RMSNorm.forward(norm, torch.zeros(2, 4, 8, device=DEVICE))
    norm = DiffusersNorm(8)
    norm.dim = torch.Size([4, 8])
    with pytest.raises(ValueError, match="dim must be one dimension"):
        kernel.layers.DiffusersRMSNorm.forward(norm, torch.zeros(2, 4, 8, device=DEVICE))


# --- GPU only --------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@gpu
def test_stream():
    x, weight = random(4096, 4096, dtype=torch.bfloat16), random(4096, dtype=torch.bfloat16)
    expected = kernel.rms_norm(x, weight)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        normed = kernel.rms_norm(late, weight)
    stream.synchronize()
    assert torch.equal(normed, expected)


@gpu
def test_graph():
    x, residual = (random(64, 1000, dtype=torch.float16, requires_grad=True) for _ in range(2))
    weight = random(1000, dtype=torch.float16, requires_grad=True)

    def step():
        normed, total = kernel.add_rms_norm(x, residual, weight)
        return torch.autograd.grad((normed, total), (x, residual, weight), (residual.detach(), x.detach()))

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
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [65, 776, 1001, 1024, 2048, 3072, 4097, 5120, 8192])
def test_backward_of_many_rows(hidden, dtype):
    """So many rows that a block gets several and loads them ahead; also with gaps between rows."""
    rows = 7001
    grads = [random(rows, hidden + 16, dtype=dtype)[:, :hidden] for _ in range(2)]
    x, residual = (random(rows, hidden, dtype=dtype, requires_grad=True) for _ in range(2))
    assert_gradients(kernel.rms_norm, eager, exact, [x], grads[:1])
    for weight_dtype in {dtype, torch.float32}:
        weight = random(hidden, dtype=weight_dtype, requires_grad=True)
        assert_gradients(kernel.rms_norm, eager, exact, [x, weight], grads[:1])
        assert_add_gradients(x, residual, weight, grads)
    first, again = (gradients_of_rows(grads[0], x.detach(), weight.detach(), grads[1]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("shape", [(2, 4096), (300, 4096), (2000, 2048), (1500, 1001), (20000, 128)])
def test_launches_that_follow_at_once(shape):
    """With PDL a kernel starts before the previous one ends, whose outputs it reads or whose inputs it overwrites."""
    x, residual = random(*shape, dtype=torch.bfloat16), random(*shape, dtype=torch.bfloat16)
    weight = random(shape[-1], dtype=torch.bfloat16)
    norms, sums, grads = [x], [residual], [x]
    for _ in range(6):
        norm, total = kernel.add_rms_norm(norms[-1], sums[-1], weight, EPS)
        norms.append(norm)
        sums.append(total)
        grads.append(gradients_of_rows(grads[-1], norm, weight, total)[0])
    in_place = (x.clone(), residual.clone())
    for _ in range(6):
        kernel.add_rms_norm_(*in_place, weight, EPS)
    assert torch.equal(in_place[0], norms[-1]) and torch.equal(in_place[1], sums[-1])
    for before, after in zip(zip(norms, sums, grads), zip(norms[1:], sums[1:], grads[1:])):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        alone = kernel.add_rms_norm(*before[:2], weight, EPS)
        assert torch.equal(alone[0], after[0]) and torch.equal(alone[1], after[1])
        assert torch.equal(gradients_of_rows(before[2], alone[0], weight, alone[1])[0], after[2])


@gpu
def test_more_elements_than_32_bits_count():
    hidden, rows = 4096, 2**19 + 3
    if torch.cuda.mem_get_info()[0] < 3 * 2 * hidden * rows:
        pytest.skip("needs 13 GB of GPU memory")
    x = torch.ones(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    x[-1] = torch.arange(hidden, device=DEVICE) % 7
    normed = kernel.rms_norm(x)
    assert torch.equal(normed[0], torch.ones_like(normed[0]))
    assert_as_good(normed[-1], eager(x[-1]), exact(x[-1]))
    # All elements as one row, and as rows of one element.
    row = x.view(1, -1)
    scale = torch.linalg.vector_norm(row, dtype=torch.float32) / row.shape[1] ** 0.5
    torch.testing.assert_close(kernel.rms_norm(row)[0, -hidden:], (x[-1] / scale).to(x.dtype))
    assert torch.equal(kernel.rms_norm(x.view(-1, 1))[:2], torch.ones(2, 1, device=DEVICE, dtype=x.dtype))


def test_matches_torch():
    x, weight = random(32, 512, dtype=torch.float32), random(512, dtype=torch.float32)
    torch.testing.assert_close(kernel.rms_norm(x, weight), F.rms_norm(x, (512,), weight, EPS))
