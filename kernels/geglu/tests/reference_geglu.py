"""References, tensors and assertions that the tests of geglu share."""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from testing import DEVICE, Op, load

PROJECT = Path(__file__).resolve().parents[1]
ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "silu": 2}  # with their numbers in the ops
GATES = ["second", "first"]
# One element, less and more than a vector, odd, not a multiple of a vector, and more than a block takes.
HIDDEN = [1, 3, 8, 17, 64, 100, 1000, 1280, 4097, 20001]


kernel = load(PROJECT)
ops = kernel._ops.ops


def random(*shape, dtype, requires_grad=False):
    return torch.randn(*shape, device=DEVICE).mul(2).to(dtype).requires_grad_(requires_grad)


def split(x, gate):
    """Return gate and up."""
    first, second = x.chunk(2, -1)
    return (first, second) if gate == "first" else (second, first)


def eager(gate, up, activation="gelu"):
    """Return the models' formula; with float64 inputs this is the reference."""
    if activation == "silu":
        return up * F.silu(gate)
    return up * F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def of_halves(x, activation="gelu", gate="second"):
    """Call the kernel's function for the halves of a tensor."""
    if activation == "silu":
        return kernel.swiglu(x, gate=gate)
    return kernel.geglu(x, approximate="tanh" if activation == "gelu_tanh" else "none", gate=gate)


def of_pair(gate, up, activation="gelu"):
    """Call the kernel's function for two tensors."""
    if activation == "silu":
        return kernel.swiglu_pair(gate, up)
    return kernel.geglu_pair(gate, up, "tanh" if activation == "gelu_tanh" else "none")


EMPTY = [2, 3, 16]  # batch, tokens and elements
OPS = {}
for name in ACTIVATIONS:
    for half in GATES:
        OPS[f"{name}, {half} half"] = Op(
            partial(of_halves, activation=name, gate=half),
            lambda x, name=name, half=half: eager(*split(x, half), name),
            lambda batch, dtype: [random(batch, 3, 16, dtype=dtype)],
        )
    OPS[f"{name} of two tensors"] = Op(
        partial(of_pair, activation=name),
        partial(eager, activation=name),
        lambda batch, dtype: [random(batch, 3, 16, dtype=dtype) for _ in range(2)],
    )
