"""How calls behave under Torch's modes, subclasses, transforms, compiler, version counters and threads."""

import threading
import warnings

import pytest
import torch
from reference_rmsnorm import kernel
from testing import DEVICE

OPTIONS = 1e-6, 0.0, False


def random(*shape, dtype=torch.float32, requires_grad=False):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_(requires_grad)


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


def test_no_warnings():
    """Torch warns when a gradient reaches an op without autograd; the functions never cause this warning."""
    x, weight = random(4, 64, requires_grad=True), random(64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for create_graph in (False, True):
            out, total = kernel.add_rms_norm(kernel.rms_norm(x, weight), x, weight)
            torch.autograd.grad((out + total).sum(), (x, weight), create_graph=create_graph)


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
