"""References, tensors and assertions that the tests of rmsnorm share.

The kernel is loaded from `build/` with the public client, as a user would load it. It runs on the GPU if there is one,
else on the CPU.
"""

from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

PROJECT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6
# One element, less and more than a vector, odd, not a multiple of a vector, several rows per warp and per block, and
# rows longer than the registers hold.
HIDDEN = [1, 3, 8, 17, 64, 100, 128, 768, 1000, 2048, 4096, 5000, 5001, 16384, 20001, 70000]


def load(project):
    """Return the package as built. Without one, skip the test, or the module that is imported."""
    try:
        return get_local_kernel(project)
    except FileNotFoundError:
        pytest.skip(f"not built: kernel-builder build {project} --backend {DEVICE}", allow_module_level=True)


kernel = load(PROJECT)
ops = kernel._ops.ops


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
    return ops.rms_norm_backward(grad, x, weight, grad_sum, weight is not None, EPS, offset)


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


def copies(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.name for event in profile.events()} & {"aten::clone", "aten::contiguous", "aten::copy_"}


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


gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
