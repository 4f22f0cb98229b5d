"""How calls behave under Torch's modes, subclasses, transforms, compiler, version counters and threads."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reference_rmsnorm import EPS, kernel, ops
from testing import DEVICE, DTYPES, random
from torch.utils.checkpoint import checkpoint


def test_forward_mode_is_seen():
    assert not kernel.derivatives.is_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert kernel.derivatives.is_forward_mode()


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


def test_no_warnings():
    """Torch warns when a gradient reaches an op without autograd; the functions never cause this warning."""
    x, weight = random(4, 64, requires_grad=True), random(64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for create_graph in (False, True):
            out, total = kernel.add_rms_norm(kernel.rms_norm(x, weight), x, weight)
            torch.autograd.grad((out + total).sum(), (x, weight), create_graph=create_graph)


def test_threads():
    """The second and the third shape need different amounts of a GPU's shared memory in one kernel."""
    inputs = [random(256 if DEVICE == "cuda" else 4, hidden, dtype=torch.bfloat16) for hidden in (1024, 32768, 40960)]
    expected = [kernel.rms_norm(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda i: torch.equal(kernel.rms_norm(inputs[i % 3]), expected[i % 3]), range(300)))


def test_negated_views_are_refused_in_place():
    x, residual = torch.complex(*random(2, 4, 16)).conj().imag, random(4, 16)
    before = x.clone(), residual.clone()
    for arguments in ((x, residual), (residual, x)):
        with pytest.raises(RuntimeError, match="negated view"):
            kernel.add_rms_norm_(*arguments)
    torch.testing.assert_close((x, residual), before, rtol=0, atol=0)
    torch.testing.assert_close(kernel.add_rms_norm(x, residual), kernel.add_rms_norm(*before))


def test_transforms_in_place():
    x, residual, weight = (random(*shape) for shape in ((3, 16), (3, 16), (16,)))

    def in_place(x, residual):
        x, residual = x * 1, residual * 1
        kernel.add_rms_norm_(x, residual, weight)
        return x, residual

    def out_of_place(x, residual):
        return kernel.add_rms_norm(x, residual, weight)

    given, directions = (x, residual), (residual, x)
    actual, expected = (torch.func.jvp(function, given, directions) for function in (in_place, out_of_place))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.func.vmap(in_place)(*given), torch.func.vmap(out_of_place)(*given))
    with pytest.raises(NotImplementedError, match="add_rms_norm_ has no gradient"):
        torch.func.grad(lambda x: in_place(x, residual)[0].sum())(x)


def test_backward_runs_the_kernel_wherever_autograd_does():
    """Checkpoints, hooks and functions of torch.autograd change no bit of a gradient."""
    x, weight = random(3, 16, requires_grad=True), random(16)
    expected = torch.autograd.grad(kernel.rms_norm(x, weight).sum(), x)
    for reentrant in (False, True):
        again = checkpoint(kernel.rms_norm, x, weight, use_reentrant=reentrant).sum()
        again.backward() if reentrant else x.__setattr__("grad", *torch.autograd.grad(again, x))
        assert torch.equal(x.grad, *expected)
        x.grad = None
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(*torch.autograd.grad(kernel.rms_norm(x, weight).sum(), x), *expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_in_place(dtype):
    weight = random(24, dtype=dtype)
    for w, before in ((None, False), (weight, True)):
        x, residual = random(3, 5, 24, dtype=dtype), random(5, 3, 24, dtype=dtype).transpose(0, 1)
        torch.library.opcheck(ops.add_rms_norm_.default, (x, residual, w, EPS, 0.0, before))


@pytest.mark.kernels_ci
def test_compile_in_place():
    def block(x, residual, weight):
        x, residual = x * 2, residual * 3
        kernel.add_rms_norm_(x, residual, weight, EPS)
        kernel.add_rms_norm_(x, residual, None, EPS)
        return x, residual

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = random(48)
    for batch in (4, 9):
        with torch.compiler.set_stance("fail_on_recompile" if batch == 9 else "default"):
            x, residual = (random(batch, 3, 48) for _ in range(2))
            torch.testing.assert_close(compiled(x, residual, weight), block(x, residual, weight))
