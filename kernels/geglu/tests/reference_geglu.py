"""References, tensors and assertions that the tests of geglu share.

The kernel is loaded from `build/` with the public client, as a user would load it. It runs on the GPU if there is one,
else on the CPU.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernels import get_local_kernel

PROJECT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
APPROXIMATE = ["none", "tanh"]
GATES = ["second", "first"]
# One element, less and more than a vector, odd, not a multiple of a vector, and more than a block takes.
HIDDEN = [1, 3, 8, 17, 64, 100, 1000, 1280, 4097, 20001]

kernel = get_local_kernel(PROJECT)
ops = kernel._ops.ops


def random(*shape, dtype, requires_grad=False):
    return torch.randn(*shape, device=DEVICE).mul(2).to(dtype).requires_grad_(requires_grad)


def split(x, gate):
    """Return gate and up."""
    first, second = x.chunk(2, -1)
    return (first, second) if gate == "first" else (second, first)


def eager(gate, up, approximate="none"):
    """Return what models compute; with float64 inputs this is the reference."""
    return up * F.gelu(gate, approximate=approximate)


def assert_as_good(actual, reference, expected):
    """Assert that the error of `actual` is at most 1.1 times that of `reference`."""
    assert actual.dtype == reference.dtype and actual.shape == reference.shape
    if actual.numel() == 0:
        return
    scale = expected.abs().max().item()
    slack = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}[actual.dtype] * max(scale, 1.0)
    error = (actual.double() - expected).abs().max().item()
    allowed = 1.1 * (reference.double() - expected).abs().max().item() + slack
    assert error <= allowed


def gradients(function, inputs, grad):
    output = function(*inputs)
    return torch.autograd.grad(output, inputs, grad.to(output.dtype))


def doubles(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def units_apart(a, b):
    """Return the distance between two 16-bit tensors, in representable numbers."""
    ordered = [t.view(torch.int16).int() for t in (a, b)]
    ordered = [torch.where(bits < 0, -(bits & 0x7FFF), bits) for bits in ordered]
    return (ordered[0] - ordered[1]).abs()


gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
