"""How calls behave under Torch's modes, subclasses, transforms, compiler, version counters and threads."""

import threading
import warnings

import pytest
import torch
from reference_rmsnorm import kernel, ops
from testing import DEVICE, DTYPES
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

OPTIONS = 1e-6, 0.0, False


def random(*shape, dtype=torch.float32, requires_grad=False):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_(requires_grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "x",
    [(4, 64), (2, 3, 65), (1,), (0, 8), "rows apart", "heads in front"],
    ids=str,
)
@pytest.mark.parametrize("weight", ["none", "tensor", "parameter", "float32"])
def test_functions_do_what_the_ops_do(x, dtype, weight):
    if x == "rows apart":
        x = random(6, 100, dtype=dtype)[::2, :64]
    elif x == "heads in front":
        x = random(2, 5, 3, 64, dtype=dtype).transpose(1, 2)
    else:
        x = random(*x, dtype=dtype)
    weight = None if weight == "none" else random(x.shape[-1], dtype=torch.float32 if weight == "float32" else dtype)
    weight = torch.nn.Parameter(weight, requires_grad=False) if weight is not None and dtype.itemsize == 2 else weight
    residual = torch.randn_like(x)
    for rounding in ("last", "before_weight"):
        options = 1e-6, 0.0, rounding == "before_weight"
        out, expected = kernel.rms_norm(x, weight, rounding=rounding), ops.rms_norm(x, weight, *options)
        assert out.stride() == expected.stride() and out.dtype == expected.dtype and torch.equal(out, expected)
    out, total = kernel.add_rms_norm(x, residual, weight)
    expected = ops.add_rms_norm(x, residual, weight, *OPTIONS)
    assert total.is_contiguous() and torch.equal(out, expected[0]) and torch.equal(total, expected[1])


class Subclass(torch.Tensor):
    pass


def test_wrong_arguments_are_errors():
    x, weight = random(4, 64), random(64)
    wrong = [
        (x.double(), weight),
        (x, random(63)),
        (x.to_sparse(), weight),
    ]
    for arguments in wrong:
        with pytest.raises((RuntimeError, NotImplementedError, AttributeError)):
            kernel.rms_norm(*arguments)
    with pytest.raises(RuntimeError, match="weight must have shape"):
        kernel.rms_norm(x, random(63))
    assert torch.equal(kernel.rms_norm(x, weight), ops.rms_norm(x, weight, *OPTIONS))  # an error leaves no state


def test_subclasses():
    x, weight = random(4, 64), random(64)
    out = kernel.rms_norm(x.as_subclass(Subclass), weight)
    assert type(out) is Subclass and torch.equal(out.as_subclass(torch.Tensor), kernel.rms_norm(x, weight))


class SeenOps(TorchDispatchMode):
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


def test_modes_see_the_ops():
    x, residual, weight = random(4, 64), random(4, 64), random(64)
    expected = kernel.rms_norm(x, weight)
    for seen in (SeenOps(), SeenFunctions()):
        with seen:
            assert torch.equal(kernel.rms_norm(x, weight), expected)
            kernel.add_rms_norm_(x.clone(), residual.clone(), weight)
        assert any("rms_norm" in name for name in seen.names)
        assert any("add_rms_norm_" in name for name in seen.names)
    with SeenOps() as seen:
        leaf = x.clone().requires_grad_()
        torch.autograd.grad(kernel.rms_norm(leaf, weight).sum(), leaf)
    assert any("rms_norm_backward" in name for name in seen.names)


def test_profiler_and_trace_see_the_ops():
    x, residual, weight = random(4, 64), random(4, 64), random(64)
    with torch.profiler.profile() as profile:
        kernel.rms_norm(x, weight)
    assert any("rms_norm" in event.key for event in profile.key_averages())
    with torch.no_grad():
        trace = torch.jit.trace(lambda x: kernel.rms_norm(x, weight), (x,), check_trace=False)
    assert "rms_norm" in str(trace.graph)
    assert torch.equal(trace(residual), kernel.rms_norm(residual, weight))


def test_forward_mode_is_seen_with_public_names_alone():
    asked, name = kernel.derivatives._Asked(), kernel.derivatives.LEVEL
    assert asked[name] == kernel.derivatives.FORWARD_AD[name] == -1
    with torch.autograd.forward_ad.dual_level():
        assert asked[name] == kernel.derivatives.FORWARD_AD[name] == 0


def test_inference_mode():
    x, weight = random(4, 64, requires_grad=True), random(64, requires_grad=True)
    expected = kernel.rms_norm(x, weight)
    with torch.inference_mode():
        out = kernel.rms_norm(x, weight)
        again = kernel.rms_norm(out, weight)  # of an inference tensor
    assert out.is_inference() and not out.requires_grad and torch.equal(out, expected)
    assert torch.equal(again, kernel.rms_norm(expected, weight))
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensor"):
        kernel.rms_norm(out, weight)  # autograd cannot save it


def test_version_counters():
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
    compiled = torch.compile(kernel.add_rms_norm_, fullgraph=True, backend="aot_eager")
    kernel.add_rms_norm_(y := x.clone(), other := residual.clone(), weight)
    compiled(x, residual, weight)
    assert torch.equal(x, y) and torch.equal(residual, other) and x._version > 2 and residual._version > 2


@pytest.mark.parametrize("saved", ["x", "residual"])
def test_saved_tensors_are_protected(saved):
    """A gradient that needs a tensor which the op has overwritten is an error."""
    leaf, weight = random(4, 64, requires_grad=True), random(64)
    tensors = {"x": random(4, 64), "residual": random(4, 64)}
    loss = (leaf * tensors[saved]).sum()
    kernel.add_rms_norm_(*tensors.values(), weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("dtype", "weight", "rounding"),
    list(zip(DTYPES, ("none", "of the dtype", "float32"), ("last", "before_weight", "last"))),
)
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_compiled_gradients_are_the_eager_ones(name, dtype, weight, rounding):
    x, residual = (random(3, 5, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    tensors = (x,) if name == "rms_norm" else (x, residual)

    def block(*arguments):
        return getattr(kernel, name)(*arguments, rounding=rounding)

    weights = {"none": None, "of the dtype": dtype, "float32": torch.float32}
    weight = None if weights[weight] is None else random(24, dtype=weights[weight], requires_grad=True)
    inputs = tensors if weight is None else (*tensors, weight)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(*tensors, weight), block(*tensors, weight)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    expected, actual = ((outputs,) if name == "rms_norm" else outputs for outputs in (expected, actual))
    grads = [torch.randn_like(output) for output in expected]
    torch.testing.assert_close(
        torch.autograd.grad(actual, inputs, grads), torch.autograd.grad(expected, inputs, grads), rtol=0, atol=0
    )
    with torch.no_grad():
        assert not any(output.requires_grad for output in compiled(*tensors, weight))


def test_no_warnings():
    """Torch warns when a gradient reaches an op without autograd; the functions never cause this warning."""
    x, weight = random(4, 64, requires_grad=True), random(64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for create_graph in (False, True):
            out, total = kernel.add_rms_norm(kernel.rms_norm(x, weight), x, weight)
            torch.autograd.grad((out + total).sum(), (x, weight), create_graph=create_graph)


def test_gradients_are_those_of_the_op():
    x, weight, grad = random(4, 64, requires_grad=True), random(64, requires_grad=True), random(4, 64)
    expected = ops.rms_norm_backward(grad, x.detach(), weight.detach(), None, True, *OPTIONS[:2])
    grads = torch.autograd.grad(kernel.rms_norm(x, weight), (x, weight), grad)
    assert all(torch.equal(result, other) for result, other in zip(grads, expected))
    grad_x, none = ops.rms_norm_backward(grad, x.detach(), weight.detach(), None, False, *OPTIONS[:2])
    assert torch.equal(grad_x, expected[0]) and none is None


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device():
    """The tensors are not on the current device, and the call does not change the current device."""
    x, weight = random(4, 64), random(64)
    there = [tensor.to("cuda:1").requires_grad_() for tensor in (x, weight)]
    here = [tensor.requires_grad_() for tensor in (x, weight)]
    with torch.no_grad():
        out = kernel.rms_norm(*there)
        assert out.device == there[0].device and torch.equal(out.cpu(), kernel.rms_norm(*here).cpu())
    gradients = torch.autograd.grad(kernel.rms_norm(*there).square().sum(), there)
    for a, b in zip(gradients, torch.autograd.grad(kernel.rms_norm(*here).square().sum(), here)):
        torch.testing.assert_close(a.cpu(), b.cpu())
    assert torch.cuda.current_device() == 0


def test_negative_views():
    """The elements of such a view are the negated values in memory, as in the imaginary part of a conjugate."""
    x, weight = random(4, 64), random(64)
    for negative in (torch._neg_view(x), torch.complex(x, x).conj().imag[:, :1]):
        factor = weight[: negative.shape[-1]].contiguous()
        expected = ops.rms_norm(negative.clone(), factor, *OPTIONS)
        assert torch.equal(kernel.rms_norm(negative, factor), expected)
    assert torch.equal(kernel.rms_norm(x, torch._neg_view(weight)), -kernel.rms_norm(x, weight))
