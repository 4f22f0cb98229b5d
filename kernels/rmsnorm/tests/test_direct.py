"""Holds calls that pass Torch's dispatcher by against the operators, and sees that who must see operators does."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

kernel = get_local_kernel(Path(__file__).resolve().parents[1])
dispatch = sys.modules[kernel.__name__ + "._dispatch"]
binary, ops = dispatch._binary, kernel._ops.ops
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = 1e-6, 0.0, False

pytestmark = pytest.mark.skipif(not dispatch._bound, reason="this Torch has no exchange table of DLPack 1")


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def otherwise(*arguments):
    return "otherwise", len(arguments)


if dispatch._bound:
    rms_norm, add_rms_norm = binary.rms_norm(otherwise), binary.add_rms_norm(otherwise)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "x",
    [(4, 64), (2, 3, 65), (1,), (0, 8), "rows apart", "heads in front"],
    ids=str,
)
@pytest.mark.parametrize("weight", ["none", "tensor", "parameter", "float32"])
def test_does_what_the_operator_does(x, dtype, weight):
    if x == "rows apart":
        x = random(6, 100, dtype=dtype)[::2, :64]
    elif x == "heads in front":
        x = random(2, 5, 3, 64, dtype=dtype).transpose(1, 2)
    else:
        x = random(*x, dtype=dtype)
    weight = None if weight == "none" else random(x.shape[-1], dtype=torch.float32 if weight == "float32" else dtype)
    weight = torch.nn.Parameter(weight, requires_grad=False) if weight is not None and dtype.itemsize == 2 else weight
    residual = torch.randn_like(x)
    for rounded_before_weight in (False, True):
        options = 1e-6, 0.0, rounded_before_weight
        out, expected = rms_norm(x, weight, *options), ops.rms_norm(x, weight, *options)
        assert out.stride() == expected.stride() and out.dtype == expected.dtype and torch.equal(out, expected)
    out, total = add_rms_norm(x, residual, weight, *OPTIONS)
    expected = ops.add_rms_norm(x, residual, weight, *OPTIONS)
    assert total.is_contiguous() and torch.equal(out, expected[0]) and torch.equal(total, expected[1])


def test_declines_what_is_not_plain_and_leaves_no_error_behind():
    x, weight = random(4, 64), random(64)
    wrong = [
        (),
        (1, 2, 3),
        (x, weight, 1e-6, 0.0),  # an argument is missing
        (x, weight, *OPTIONS, None),
        (x, weight, "eps", 0.0, False),
        (x, "weight", *OPTIONS),
        ("x", weight, *OPTIONS),
        (None, weight, *OPTIONS),
        (x.as_subclass(Subclass), weight, *OPTIONS),
        (x.double(), weight, *OPTIONS),
        (x.to("meta"), weight, *OPTIONS),
        (x, random(63), *OPTIONS),  # what the operator reports
        (x.to_sparse(), weight, *OPTIONS),
        (torch._efficientzerotensor(4, 64, device=DEVICE), weight, *OPTIONS),  # which has no memory
        (x.clone().requires_grad_(), weight, *OPTIONS),
        (x, torch.nn.Parameter(weight), *OPTIONS),
    ]
    for arguments in wrong:
        assert rms_norm(*arguments) == ("otherwise", len(arguments))
        assert binary.add_rms_norm_(*arguments[:1], *arguments) is False
    with pytest.raises(ZeroDivisionError):
        binary.rms_norm(lambda *_: 1 / 0)(x)
    with pytest.raises(RuntimeError, match="weight must have shape"):
        kernel.rms_norm(x, random(63))
    assert kernel.rms_norm(x.as_subclass(Subclass), weight).shape == x.shape


@pytest.mark.parametrize("weight_grad", [True, False])
def test_gradients_are_those_of_the_operator(weight_grad):
    x, grad, grad_sum, weight = random(4, 64), random(4, 64), random(4, 64), random(64)
    backward = binary.rms_norm_backward(otherwise)
    for options in ((grad_sum, 1e-6, 0.0, weight_grad), (None, 1e-6, 1.0, weight_grad)):
        grad_x, grad_weight = backward(grad, x, weight, *options)
        expected = ops.rms_norm_backward(grad, x, weight, *options)
        assert torch.equal(grad_x, expected[0])
        assert torch.equal(grad_weight, expected[1]) if weight_grad else grad_weight is None
    assert (backward(grad[:0], x[:0], weight, *options)[0] == "otherwise") is weight_grad  # all zeros
    assert backward(grad[:, :1].expand(4, 64), x, weight, *options)[0] == "otherwise"  # which takes a copy


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.names.append(str(function))
        return function(*arguments, **(named or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, arguments=(), named=None):
        self.names.append(str(function))
        return function(*arguments, **(named or {}))


def test_who_watches_sees_the_operators():
    x, residual, weight = random(4, 64), random(4, 64), random(64)
    expected = kernel.rms_norm(x, weight)
    for seen in (Seen(), SeenFunctions()):
        with seen:
            assert torch.equal(kernel.rms_norm(x, weight), expected)
            kernel.add_rms_norm_(x.clone(), residual.clone(), weight)
        assert any("rms_norm" in name for name in seen.names)
        assert any("add_rms_norm_" in name for name in seen.names)
        assert not any("is_neg" in name for name in seen.names)  # what nobody has called
    with torch.profiler.profile() as profile:
        kernel.rms_norm(x, weight)
    assert any("rms_norm" in event.key for event in profile.key_averages())
    with torch.no_grad():
        trace = torch.jit.trace(lambda x: kernel.rms_norm(x, weight), (x,), check_trace=False)
    assert "rms_norm" in str(trace.graph)
    assert torch.equal(trace(residual), kernel.rms_norm(residual, weight))


def test_transformations_get_what_the_operator_gives_them():
    x, weight = random(4, 64), random(64)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: kernel.rms_norm(x, weight).sum())(x)
    inside = torch.func.vmap(lambda y: y + kernel.rms_norm(x, weight).sum())(x)
    assert torch.allclose(inside, x + kernel.rms_norm(x, weight).sum())


def test_changes_are_counted():
    x, residual, weight = random(4, 64), random(4, 64), random(64)
    expected = kernel.add_rms_norm(x, residual, weight)
    kernel.add_rms_norm_(x, residual, weight)
    assert x._version == residual._version == 1
    assert torch.equal(x, expected[0]) and torch.equal(residual, expected[1])
    with torch.inference_mode():
        y, other = x.clone(), residual.clone()
        kernel.add_rms_norm_(y, other, weight)
        kernel.add_rms_norm_(x, residual, weight)
    assert torch.equal(x, y) and x._version == 2


def test_threads():
    x, weight = random(512, 1024), random(1024)
    expected = kernel.rms_norm(x, weight)
    wrong = []

    def call():
        for _ in range(50):
            if not torch.equal(kernel.rms_norm(x, weight), expected):
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_keeps_nothing():
    x, weight = random(4, 64), random(64)
    kept = x, weight, otherwise, torch.Tensor, torch.nn.Parameter, torch.float32, None, True
    counts = [sys.getrefcount(one) for one in kept]
    for _ in range(1000):
        rms_norm(x, weight, *OPTIONS)
        rms_norm(x.t(), None, *OPTIONS)
        rms_norm(x, "weight", *OPTIONS)
        add_rms_norm(x, x, weight, *OPTIONS)
        binary.add_rms_norm_(x, x, weight, *OPTIONS)
    assert all(abs(sys.getrefcount(one) - before) < 50 for one, before in zip(kept, counts))
    assert sys.getrefcount(rms_norm(x, weight, *OPTIONS)) == sys.getrefcount(x.clone())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device():
    """The current device is another one than that of the tensors, and stays so."""
    x, weight = random(4, 64), random(64)
    there = [one.to("cuda:1").requires_grad_() for one in (x, weight)]
    here = [one.requires_grad_() for one in (x, weight)]
    with torch.no_grad():
        assert rms_norm(*there, *OPTIONS)[0] == "otherwise"
        out = kernel.rms_norm(*there)
        assert out.device == there[0].device and torch.equal(out.cpu(), kernel.rms_norm(*here).cpu())
    gradients = torch.autograd.grad(kernel.rms_norm(*there).square().sum(), there)
    for a, b in zip(gradients, torch.autograd.grad(kernel.rms_norm(*here).square().sum(), here)):
        torch.testing.assert_close(a.cpu(), b.cpu())
    assert torch.cuda.current_device() == 0


def test_negative_views():
    """Whose elements are the negatives of what their memory holds, as of the imaginary part of a conjugate."""
    x, weight = random(4, 64), random(64)
    for negative in (torch._neg_view(x), torch.complex(x, x).conj().imag[:, :1]):
        factor = weight[: negative.shape[-1]].contiguous()
        expected = ops.rms_norm(negative.clone(), factor, *OPTIONS)
        assert torch.equal(kernel.rms_norm(negative, factor), expected)
    assert torch.equal(kernel.rms_norm(x, torch._neg_view(weight)), -kernel.rms_norm(x, weight))
