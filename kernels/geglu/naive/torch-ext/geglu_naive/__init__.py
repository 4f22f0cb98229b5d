"""The naive kernel of gated activations, forward: see geglu.cu."""

from torch import Tensor

from ._ops import ops

ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "silu": 2}


def of_pair(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return `up * activation(gate)`, contiguous, for two tensors of two or more dimensions and equal strides."""
    rows = ops.gated(gate.flatten(0, -2), up.flatten(0, -2), ACTIVATIONS[activation])
    return rows.view(gate.shape)


def of_halves(x: Tensor, activation: str) -> Tensor:
    """Return the same for the halves of the last dimension of x: up, then gate."""
    up, gate = x.chunk(2, -1)
    return of_pair(gate, up, activation)


__all__ = ["of_halves", "of_pair"]
