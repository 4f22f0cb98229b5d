"""The public functions, and the fakes and gradients of their ops."""

from typing import Optional

import torch
from torch import Tensor, is_grad_enabled
from torch.nn.functional import gelu, silu

from ._ops import add_op_namespace_prefix, ops
from .derivatives import FORWARD_AD, LEVEL, gradients, raise_unless_transformed, transform_with
from .devices import refuse_cpu


def geglu(x: Tensor, up: Optional[Tensor] = None, *, approximate: str = "none", gate: str = "second") -> Tensor:
    """Return `up * gelu(gate)`, contiguous, where gate and up are the halves of the last dimension of `x`.

    Args:
        x: float32, float16 or bfloat16, of any shape whose last size is even. Rows that are evenly strided and whose
            elements are adjacent are read in place; other tensors are copied.
        up: If given, `x` is the whole gate: `geglu(gate, up)` is `geglu_pair(gate, up)`.
        approximate: `"none"` for the exact gelu, `"tanh"` for its approximation.
        gate: Which half of `x` is the gate, `"first"` or `"second"`.

    The arithmetic is float32, and the result is rounded to the dtype of `x` once. `x` and `up` get gradients.

    Raises:
        TypeError: If an argument has a wrong type; the message names it.
        ValueError: If `approximate` or `gate` has another value, or if `gate` is given with `up`.
        RuntimeError: If a tensor has a wrong shape, dtype or device; the message names it.
    """
    if gate != "second":
        _check_gate(gate, up)
    if up is not None:
        return geglu_pair(x, up, approximate)
    activation = _GELU if approximate == "none" else _approximate_gelu(approximate)
    try:
        if FORWARD_AD[LEVEL] < 0:
            if is_grad_enabled() and x.requires_grad:
                return _Halves.apply(x, activation, gate == "first")
            return _geglu_halves(x, activation, gate == "first")
    except Exception as error:
        raise_unless_transformed(error, geglu, locals())
    return _halves_formula(x, activation, gate == "first")


def geglu_pair(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Return `up * gelu(gate)`, contiguous.

    Args:
        gate: float32, float16 or bfloat16, of any shape. It is read in place as in `geglu`.
        up: Of the shape and dtype of `gate`; its strides may differ.
        approximate: As in `geglu`.

    Raises:
        TypeError, ValueError, RuntimeError: As `geglu`.
    """
    activation = _GELU if approximate == "none" else _approximate_gelu(approximate)
    try:
        if FORWARD_AD[LEVEL] < 0:
            if is_grad_enabled() and (gate.requires_grad or up.requires_grad):
                return _Pair.apply(gate, up, activation)
            return _geglu_pair(gate, up, activation)
    except Exception as error:
        raise_unless_transformed(error, geglu_pair, locals())
    return _pair_formula(gate, up, activation)


def swiglu(x: Tensor, up: Optional[Tensor] = None, *, gate: str = "second") -> Tensor:
    """Return `up * silu(gate)`, contiguous, where gate and up are the halves of the last dimension of `x`.

    Args:
        x: As in `geglu`.
        up: If given, `x` is the whole gate: `swiglu(gate, up)` is `swiglu_pair(gate, up)`.
        gate: As in `geglu`.

    The arithmetic is float32, and the result is rounded to the dtype of `x` once. Models that round `silu(gate)` before
    the product get a result that is closer to float32, at most one unit in the last place from theirs. `x` and `up` get
    gradients.

    Raises:
        TypeError, ValueError, RuntimeError: As `geglu`.
    """
    if gate != "second":
        _check_gate(gate, up)
    if up is not None:
        return swiglu_pair(x, up)
    try:
        if FORWARD_AD[LEVEL] < 0:
            if is_grad_enabled() and x.requires_grad:
                return _Halves.apply(x, _SILU, gate == "first")
            return _geglu_halves(x, _SILU, gate == "first")
    except Exception as error:
        raise_unless_transformed(error, swiglu, locals())
    return _halves_formula(x, _SILU, gate == "first")


def swiglu_pair(gate: Tensor, up: Tensor) -> Tensor:
    """Return `up * silu(gate)`, contiguous, rounded once.

    Args:
        gate, up: As in `geglu_pair`.

    Raises:
        TypeError, RuntimeError: As `geglu`.
    """
    try:
        if FORWARD_AD[LEVEL] < 0:
            if is_grad_enabled() and (gate.requires_grad or up.requires_grad):
                return _Pair.apply(gate, up, _SILU)
            return _geglu_pair(gate, up, _SILU)
    except Exception as error:
        raise_unless_transformed(error, swiglu_pair, locals())
    return _pair_formula(gate, up, _SILU)


# The numbers of `Activation` in geglu/problem.h.
_GELU, _GELU_TANH, _SILU = 0, 1, 2
_APPROXIMATIONS = "none", "tanh"


def _check_gate(gate: str, up: Optional[Tensor]) -> None:
    if gate != "first":
        raise ValueError(f"geglu: gate must be 'first' or 'second', not {gate!r}")
    if up is not None:
        raise ValueError("geglu: gate chooses a half of x, which has none when up is given")


def _approximate_gelu(approximate: str) -> int:
    if approximate != "tanh":
        raise ValueError(f"geglu: approximate must be 'none' or 'tanh', not {approximate!r}")
    return _GELU_TANH


_geglu_halves = ops.geglu_halves.default
_geglu_pair = ops.geglu_pair.default
_geglu_halves_backward = ops.geglu_halves_backward.default
_geglu_pair_backward = ops.geglu_pair_backward.default


# --- gradients -------------------------------------------------------------------------------------------------------


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, activation, gate_first):
        ctx.save_for_backward(x)
        ctx.options = activation, gate_first
        return _geglu_halves(x, activation, gate_first)

    @staticmethod
    def backward(ctx, grad):
        if is_grad_enabled():  # in a backward pass only with `create_graph=True`
            return *gradients(_halves_formula, ctx.saved_tensors, ctx.options, (grad,)), None, None
        return _geglu_halves_backward(grad, *ctx.saved_tensors, *ctx.options), None, None


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _geglu_pair(gate, up, activation)

    @staticmethod
    def backward(ctx, grad):
        if is_grad_enabled():  # in a backward pass only with `create_graph=True`
            return *gradients(_pair_formula, ctx.saved_tensors, (ctx.activation,), (grad,)), None
        return *_geglu_pair_backward(grad, *ctx.saved_tensors, ctx.activation), None


# --- fakes: shapes and dtypes of results; the binding checks the arguments ------------------------------------------


@torch.library.register_fake(add_op_namespace_prefix("geglu_halves"))
def _geglu_halves_fake(x, activation, gate_first):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.register_fake(add_op_namespace_prefix("geglu_pair"))
def _geglu_pair_fake(gate, up, activation):
    return gate.new_empty(gate.shape)


@torch.library.register_fake(add_op_namespace_prefix("geglu_halves_backward"))
def _geglu_halves_backward_fake(grad, x, activation, gate_first):
    return x.new_empty(x.shape)


@torch.library.register_fake(add_op_namespace_prefix("geglu_pair_backward"))
def _geglu_pair_backward_fake(grad, gate, up, activation):
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


# --- formulas --------------------------------------------------------------------------------------------------------


def _halves_formula(x, activation, gate_first):
    first, second = x.chunk(2, -1)
    return _pair_formula(first, second, activation) if gate_first else _pair_formula(second, first, activation)


def _pair_formula(gate, up, activation):
    wide = gate.float()
    activated = silu(wide) if activation == _SILU else gelu(wide, approximate=_APPROXIMATIONS[activation])
    return (up.float() * activated).to(gate.dtype)


transform_with("geglu_halves", _halves_formula)
transform_with("geglu_pair", _pair_formula)

refuse_cpu("geglu_halves", "geglu_pair", "geglu_halves_backward", "geglu_pair_backward")
