"""Calls that a kernel cannot serve: they compute the op's formula in Torch operations, or explain the error.

A kernel computes a forward pass, and the backward pass that a `torch.autograd.Function` calls. Forward-mode
differentiation, the transforms of `torch.func` and second derivatives use the formula, all derivatives of which Torch
knows.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any, Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import is_tensor_like

from ._ops import add_op_namespace_prefix

# `FORWARD_AD[LEVEL]` is -1 unless forward-mode differentiation is on, in which an op would lose the tangents of its
# arguments. The public `unpack_dual` takes 0.4 us, a tenth of a call; reading its variable takes 0.03 us. In a Torch
# without this variable, all calls compute their formulas.
LEVEL = "_current_level"
FORWARD_AD = vars(forward_ad) if LEVEL in vars(forward_ad) else {LEVEL: 0}


def is_forward_mode() -> bool:
    """Return whether forward-mode differentiation is on."""
    return FORWARD_AD[LEVEL] >= 0


def transform_with(name: str, formula: Callable[..., Any]) -> None:
    """Let transforms of `torch.func`, also those that `torch.compile` traces, compute an op by its formula."""
    torch.library.impl(add_op_namespace_prefix(name), "FuncTorchDynamicLayerFrontMode")(formula)


def refuse_negated(*names: str) -> None:
    """Let ops in place refuse negated views. Torch's own fallback can fail when it has written some results."""

    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("no argument may be a negated view, such as x.conj().imag: pass resolve_neg() of it")

    for name in names:
        torch.library.impl(add_op_namespace_prefix(name), "Negative")(refuse)


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any) -> None:
        return None


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` is active. Takes some microseconds."""
    try:
        _Probe.apply()
    except RuntimeError:  # no transform takes a function without `setup_context`
        return True
    return False


def gradients(
    formula: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    options: tuple[Any, ...],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradients of the tensors, which can be differentiated again, from those of the results.

    The results are `formula(*tensors, *options)`. A tensor that is None has the gradient None.
    """
    given = [index for index, tensor in enumerate(tensors) if tensor is not None]

    def function(*primals: Tensor) -> tuple[Tensor, ...]:
        replaced = dict(zip(given, primals))
        results = formula(*(replaced.get(index) for index in range(len(tensors))), *options)
        results = (results,) if isinstance(results, Tensor) else results
        return tuple(result for result, grad in zip(results, grads) if grad is not None)

    _, pull_back = torch.func.vjp(function, *(tensors[index] for index in given))
    input_grads = dict(zip(given, pull_back(tuple(grad for grad in grads if grad is not None))))
    return [input_grads.get(index) for index in range(len(tensors))]


def raise_unless_transformed(error: Exception, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raise the error of a call, unless a transform of `torch.func` caused it, for which the formula is computed.

    Raises:
        TypeError: As `check_types`.
    """
    check_types(function, arguments)
    if not isinstance(error, RuntimeError) or not is_transformed():
        raise error


def check_types(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Compare the arguments of a failed call with the annotations of the function.

    Raises:
        TypeError: If an argument has another type; the message names it.
    """
    for name, expected in typing.get_type_hints(function).items():
        kinds = typing.get_args(expected) if typing.get_origin(expected) in _UNIONS else (expected,)
        if name in arguments and not any(_fits(arguments[name], kind) for kind in kinds):
            wanted = " or ".join(_NAMES.get(kind, "a sequence") for kind in kinds)
            raise TypeError(f"{function.__name__}: {name} must be {wanted}, not {type(arguments[name]).__name__}")


_UNIONS = typing.Union, getattr(types, "UnionType", None)
_NAMES = {Tensor: "a Tensor", bool: "a bool", float: "a number", int: "an integer", str: "a str", type(None): "None"}


def _fits(value: Any, kind: Any) -> bool:
    if kind is Tensor:
        return is_tensor_like(value)
    if kind in (float, int):  # also a number of NumPy, a symbolic one, or a tensor
        return hasattr(value, "__float__" if kind is float else "__index__")
    if kind in (bool, str, type(None)):
        return isinstance(value, kind)
    return hasattr(value, "__len__") and not isinstance(value, str)
