"""The operators as functions, and what Torch must know about them to trace and differentiate them."""

from typing import Optional

import torch

from ._dispatch import differentiable, differentiable_once
from ._ops import add_op_namespace_prefix


def geglu(
    x: torch.Tensor, up: Optional[torch.Tensor] = None, *, approximate: str = "none", gate: str = "second"
) -> torch.Tensor:
    """Returns `up * gelu(gate)`, contiguous, where gate and up are the halves of the last dimension of `x`.

    Args:
        x: float32, float16 or bfloat16, of any shape whose last size is even. Only the elements of a row need to be
            adjacent: other strides are read as they are.
        up: When given, `x` is the gate as a whole: `geglu(gate, up)` is `geglu_pair(gate, up)`.
        approximate: "none" for the exact gelu, "tanh" for its approximation.
        gate: Which half of `x` is the gate, "first" or "second".

    The arithmetic is float32, and the result is rounded to the dtype of `x` once.

    Raises:
        ValueError: If `approximate` or `gate` is none of its choices, or if there is no half for `gate` to choose.
        RuntimeError: If a tensor has a wrong shape, dtype or device; the message names it.
    """
    if gate not in ("first", "second"):
        raise ValueError(f"geglu: gate must be 'first' or 'second', not {gate!r}")
    if up is None:
        return _halves(x, _is_tanh(approximate), gate == "first")
    if gate != "second":
        raise ValueError("geglu: gate chooses a half of x, which has none when up is given")
    return _pair(x, up, _is_tanh(approximate))


def geglu_pair(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Returns `up * gelu(gate)`, contiguous.

    Args:
        gate: float32, float16 or bfloat16, of any shape. Only the elements of a row need to be adjacent.
        up: Of the shape and dtype of `gate`; its strides may differ.
        approximate: As in `geglu`.

    Raises:
        ValueError: If `approximate` is none of its choices.
        RuntimeError: If a tensor has a wrong shape, dtype or device; the message names it.
    """
    return _pair(gate, up, _is_tanh(approximate))


def _is_tanh(approximate: str) -> bool:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"geglu: approximate must be 'none' or 'tanh', not {approximate!r}")
    return approximate == "tanh"


def _check(tensor: torch.Tensor, name: str) -> None:
    types = (torch.float32, torch.float16, torch.bfloat16)
    torch._check(tensor.dtype in types, lambda: f"geglu: {name} must be float32, float16 or bfloat16")
    torch._check(tensor.dim() > 0, lambda: f"geglu: {name} must have at least one dimension")


@torch.library.register_fake(add_op_namespace_prefix("geglu_halves"))
def _geglu_halves_fake(x, tanh, gate_first):
    _check(x, "x")
    size = x.shape[-1]
    torch._check(
        size % 2 == 0, lambda: f"geglu: x must have an even number of elements in its last dimension, not {size}"
    )
    return x.new_empty((*x.shape[:-1], size // 2))


@torch.library.register_fake(add_op_namespace_prefix("geglu_pair"))
def _geglu_pair_fake(gate, up, tanh):
    _check(gate, "gate")
    torch._check(up.device == gate.device, lambda: "geglu: up must be on the device of gate")
    torch._check(up.dtype == gate.dtype, lambda: "geglu: up must have the dtype of gate")
    torch._check(up.shape == gate.shape, lambda: f"geglu: up must have shape {list(gate.shape)}, not {list(up.shape)}")
    return gate.new_empty(gate.shape)


@torch.library.register_fake(add_op_namespace_prefix("geglu_halves_backward"))
def _geglu_halves_backward_fake(grad, x, tanh, gate_first):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("geglu_pair_backward"))
def _geglu_pair_backward_fake(grad, gate, up, tanh):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tanh, gate_first):
        ctx.save_for_backward(x)
        ctx.choices = tanh, gate_first
        return _raw_halves(x, tanh, gate_first)

    @staticmethod
    def backward(ctx, grad):
        return _halves_backward(grad, *ctx.saved_tensors, *ctx.choices), None, None


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, tanh):
        ctx.save_for_backward(gate, up)
        ctx.tanh = tanh
        return _raw_pair(gate, up, tanh)

    @staticmethod
    def backward(ctx, grad):
        return (*_pair_backward(grad, *ctx.saved_tensors, ctx.tanh), None)


_ONCE = "geglu: its gradient cannot be differentiated a second time"

_raw_halves = differentiable("geglu_halves")
_raw_pair = differentiable("geglu_pair")
_halves = differentiable("geglu_halves", _Halves, 1)
_pair = differentiable("geglu_pair", _Pair, 2)
_halves_backward = differentiable_once("geglu_halves_backward", _ONCE)
_pair_backward = differentiable_once("geglu_pair_backward", _ONCE)
