"""`linear_cross_entropy` and its gradients, compared with the formula in float64."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from differentiate import assert_derivatives
from testing import DEVICE, DTYPES, assert_as_good, assert_compiles, assert_replays, gpu, load, random
from torch._subclasses.fake_tensor import FakeTensorMode

kernel = load(Path(__file__).parents[1])
IGNORED = -100


def formula(x, weight, bias, target, reduction="mean", label_smoothing=0.0, softcap=0.0, z_loss=0.0):
    """Return the loss as models compute it: logits in the dtype of `x`, the rest in at least float32."""
    logits = F.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    loss = F.cross_entropy(logits, target, reduction=reduction, label_smoothing=label_smoothing)
    kept = (target != IGNORED).to(logits.dtype)
    squares = (z_loss * torch.logsumexp(logits, -1).square() * kept).sum()
    return loss + (squares / kept.sum() if reduction == "mean" else squares)


def arguments(rows, hidden, classes, dtype, bias=False):
    """Return the arguments of `formula`; every third target is ignored."""
    target = torch.randint(classes, (rows,), device=DEVICE)
    target[::3] = IGNORED
    x, weight = (random(size, hidden, dtype=dtype, requires_grad=True) for size in (rows, classes))
    return x, weight, random(classes, dtype=dtype, requires_grad=True) if bias else None, target


def with_gradients(function, tensors, target, options):
    loss = function(*tensors, target, **options)
    return loss, *torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None], torch.tensor(0.7))


def fused(x, weight, bias, target, **options):
    return kernel.linear_cross_entropy(x, weight, target, linear_bias=bias, **options)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden", "classes", "bias"), [(37, 64, 1000, True), (9, 48, 515, False)])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"softcap": 5.0, "z_loss": 1e-2, "label_smoothing": 0.2}],
    ids=["mean", "sum", "smoothed", "all"],
)
def test_loss_and_gradients(rows, hidden, classes, bias, options, dtype):
    *tensors, target = arguments(rows, hidden, classes, dtype, bias)
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    expected = with_gradients(formula, doubles, target, options)
    reference = with_gradients(formula, tensors, target, options)
    actual = with_gradients(fused, tensors, target, options)
    for values in zip(actual, reference, expected):
        assert_as_good(*values, factor=1.5)


@pytest.mark.parametrize(
    ("classes", "logit", "mean", "scale", "options"),
    [(1024, 0, 0, 2**16, {}), (2048, 11, 0, 2**16, {}), (8, 0, 50, 2**9, {}), (512, 0, 0, 16, {"reduction": "sum"})],
    ids=["many rows", "confident", "features of one sign", "sum"],
)
def test_float16_gradients_under_a_loss_scale(classes, logit, mean, scale, options):
    """None underflows before it is multiplied by the scale, and none overflows: errors are those of Torch's code."""
    target, weight = torch.randint(classes, (4096,), device=DEVICE), F.normalize(random(classes, 32))
    x = (weight[target] * logit if logit else random(4096, 32) + mean).half().requires_grad_()
    weight = weight.half().requires_grad_()
    logits = F.linear(x, weight).double().detach().requires_grad_()
    (of_logits,) = torch.autograd.grad(F.cross_entropy(logits, target, **options), logits)
    errors = {}
    for function in (fused, formula):
        loss = function(x, weight, None, target, **options) * scale
        expected = of_logits @ weight.double(), of_logits.t() @ x.double()
        for name, grad, exact in zip(("x", "weight"), torch.autograd.grad(loss, (x, weight)), expected):
            errors[function, name] = (grad.double() / scale - exact).norm() / exact.norm()
    assert all(errors[fused, name] <= 1.1 * errors[formula, name] for name in ("x", "weight")), errors


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_of_the_loss_is_not_rounded_to_the_dtype(dtype):
    *tensors, target = arguments(64, 32, 128, dtype)
    for whole, third in zip(*(torch.autograd.grad(fused(*tensors, target) / n, tensors[:2]) for n in (1, 3))):
        assert abs(3 * third.double().norm() / whole.double().norm() - 1) < 5e-4


def test_chunks_add_up(monkeypatch):
    """Rows of nine chunks, of which the last is shorter, in several dimensions."""
    monkeypatch.setattr(sys.modules[kernel.linear_cross_entropy.__module__], "_LEAST_BYTES", 0)
    x, weight, bias, target = arguments(300, 8, 64, torch.float32, bias=True)
    expected = with_gradients(formula, (x, weight, bias), target, {})
    x, target = x.detach().view(3, 100, 8).requires_grad_(), target.view(3, 100)
    loss, of_x, *others = with_gradients(fused, (x, weight, bias), target, {})
    for actual, reference in zip((loss, of_x.view(300, 8), *others), expected):
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_tensors_get_no_gradient(frozen):
    *tensors, target = arguments(8, 16, 32, torch.float32)
    tensors[frozen].requires_grad_(False)
    fused(*tensors, target).backward()
    assert [tensor.grad is None for tensor in tensors[:2]] == [frozen == 0, frozen == 1]


def test_rows_without_a_class():
    """As in Torch, the mean of no row is NaN and the sum 0; here a number that is no class gives NaN."""
    x, weight, _, target = arguments(4, 16, 32, torch.float32)
    target.fill_(IGNORED)
    assert fused(x, weight, None, target).isnan()
    loss = fused(x, weight, None, target, reduction="sum")
    assert loss == 0 and torch.autograd.grad(loss, x)[0].eq(0).all()
    target = torch.tensor([1, 1, 32, IGNORED], device=DEVICE)
    loss = fused(x, weight, None, target)
    for _ in ("kernel", "formula"):
        of_x, of_weight = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        assert loss.isnan() and of_weight.isnan().all() and of_x.isnan().any(1).tolist() == [False, False, True, False]
    assert torch.func.jvp(lambda x: fused(x, weight, None, target), (x,), (x,))[1].isnan()
    loss = fused(x[:0], weight, None, target[:0], reduction="sum")
    assert loss == 0 and torch.autograd.grad(loss, weight)[0].eq(0).all()


def test_derivatives():
    x, weight, bias, target = (None if t is None else t.detach() for t in arguments(5, 6, 7, torch.float32, bias=True))
    options = {"softcap": 3.0, "z_loss": 0.1}
    assert_derivatives(
        lambda *tensors: fused(*tensors, target, **options),
        lambda *tensors: formula(*tensors, target, **options),
        (x, weight, bias),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_second_backward_pass_and_one_of_a_batch_compute_the_same(dtype):
    x, weight, _, target = arguments(4, 16, 32, dtype)
    close = {"rtol": 2e-3, "atol": 2e-4} if dtype == torch.float16 else {}
    loss = fused(x, weight, None, target)
    factors = torch.tensor([1.0, 2.0], device=DEVICE)
    batch = torch.autograd.grad(loss, (x, weight), factors, True, is_grads_batched=True)
    first = [grad.clone() for grad in torch.autograd.grad(loss, (x, weight), retain_graph=True)]
    for actual, expected, both in zip(torch.autograd.grad(loss, (x, weight)), first, batch):
        torch.testing.assert_close(actual, expected, **close)
        torch.testing.assert_close(both, torch.stack((expected, 2 * expected)), **close)


def test_small_factors_of_a_batch_are_not_rounded_to_float16():
    x, weight, _, target = arguments(4096, 16, 32, torch.float16)
    factors = torch.tensor([1.0, 0.01], device=DEVICE)
    loss = fused(x, weight, None, target)
    whole, small = torch.autograd.grad(loss, weight, factors, is_grads_batched=True)[0].double()
    assert (small / 0.01 - whole).norm() < 5e-3 * whole.norm()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("largest", [10.0, 1000.0, 20000.0])
def test_float16_gradients_of_a_z_loss_are_finite(largest, reduction):
    rows, hidden = 256, 8
    x, weight = torch.ones(rows, hidden, device=DEVICE), torch.zeros(4, hidden, device=DEVICE)
    weight[0] = largest / hidden
    target = torch.ones(rows, dtype=torch.int64, device=DEVICE)
    options = {"z_loss": 10 / largest, "reduction": reduction}
    actual, expected = (
        with_gradients(function, (*(t.to(dtype).requires_grad_() for t in (x, weight)), None), target, options)
        for function, dtype in ((fused, torch.float16), (formula, torch.float64))
    )
    for value, exact in zip(actual, expected):
        torch.testing.assert_close(value.double(), exact, rtol=5e-3, atol=1e-6)


def test_autocast_computes_logits_in_its_dtype():
    x, weight, _, target = arguments(8, 16, 32, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        actual = with_gradients(fused, (x, weight, None), target, {})
        expected = with_gradients(formula, (x, weight, None), target, {})
    assert [value.dtype for value in actual] == 3 * [torch.float32]
    for values in zip(actual, expected):
        torch.testing.assert_close(*values, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compile(dtype):
    target = torch.randint(32, (9,), device=DEVICE)

    def inputs_of(batch):
        return [random(size, 16, dtype=dtype, requires_grad=True) for size in (batch, 32)]

    assert_compiles(lambda x, weight: fused(x, weight, None, target[: len(x)]), inputs_of)


def test_opcheck():
    op = sys.modules[kernel.linear_cross_entropy.__module__].ops.cross_entropy_.default
    logits, target = random(4, 32, dtype=torch.bfloat16), torch.arange(4, device=DEVICE)
    torch.library.opcheck(op, (logits, target, torch.ones(1, device=DEVICE), IGNORED, 0.0, 0.0, 0.0))


def test_traced_gradients_have_the_strides_of_the_computed():
    x, weight, _, target = arguments(6, 16, 32, torch.float32)
    x = x.detach().view(3, 2, 16).transpose(0, 1).requires_grad_()
    tensors = x, weight, target.view(2, 3)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in tensors]
    computed = with_gradients(fused, (*tensors[:2], None), tensors[2], {})
    *metas, _, target = (None if t is None else t.to("meta") for t in arguments(6, 16, 32, torch.float16))
    assert [value.shape for value in with_gradients(fused, (*metas, None), target, {})] == [(), (6, 16), (32, 16)]
    with mode:
        traced = with_gradients(fused, (*fakes[:2], None), fakes[2], {})
    assert [value.stride() for value in traced] == [value.stride() for value in computed]


@gpu
def test_cuda_graph():
    x, weight, _, target = arguments(8, 64, 1000, torch.bfloat16)
    with torch.no_grad():
        assert_replays(lambda: fused(x, weight, None, target), x)


@gpu
def test_as_many_classes_as_are_supported():
    logits = torch.zeros(1, 2**31 - 1, dtype=torch.float16, device=DEVICE)
    op = sys.modules[kernel.linear_cross_entropy.__module__].ops.cross_entropy_
    loss = op(logits, torch.tensor([7], device=DEVICE), torch.ones(1, device=DEVICE), IGNORED, 0.0, 0.0, 0.0)
    torch.testing.assert_close(loss.item(), math.log(logits.numel()), rtol=1e-3, atol=0)
    assert logits[0, 7] == -1 and not logits[0, 8:].any()


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        (r"target must have shape \[4\], not \[3\]", {"target": torch.zeros(3, dtype=torch.int64)}),
        (r"linear_weight must have shape \[classes, 16\]", {"linear_weight": torch.zeros(32, 8)}),
        (r"linear_bias must have shape \[32\]", {"linear_bias": torch.zeros(8)}),
        ("reduction must be 'mean' or 'sum', not 'none'", {"reduction": "none"}),
        ("label_smoothing must be from 0 to 1, not 2.0", {"label_smoothing": 2.0}),
        ("label_smoothing must be a number, not str", {"label_smoothing": "0"}),
        ("target must be int64", {"target": torch.zeros(4, dtype=torch.int32)}),
        ("linear_weight must be a Tensor, not list", {"linear_weight": [1]}),
    ],
)
def test_errors_name_the_argument(message, changed):
    given = {"input": torch.zeros(4, 16), "linear_weight": torch.zeros(32, 16), "target": torch.zeros(4).long()}
    given = {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in {**given, **changed}.items()}
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        kernel.linear_cross_entropy(**given)
