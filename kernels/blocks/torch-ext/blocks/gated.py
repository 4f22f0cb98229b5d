"""Activations, recognized by their results, and their products with the gated values."""

import functools
import weakref
from types import FunctionType, MethodType
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from . import probes
from .deferred import Deferred, now, pending
from .kernel_set import PLAIN_TENSORS, fits, geglu, is_like, share_memory

# "silu", or for gelu the argument `approximate` of its kernels.
_STATEMENTS = {
    "silu": silu,
    "none": gelu,
    "tanh": lambda x: gelu(x, approximate="tanh"),
}

_of_modules: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Optional[str]]]" = weakref.WeakKeyDictionary()
_of_functions: dict[Any, Optional[str]] = {}
_of_classes: dict[Any, Optional[str]] = {}
# Functions that may be an activation. Others are not called for a trial: they may have side effects.
_ELEMENTWISE = {"gelu", "silu", "sigmoid", "tanh", "erf", "pow", "square"}


def activation_of(activation: Any) -> Optional[str]:
    """Return the kernels' name of an activation, a module or function, or None if it must be called."""
    if isinstance(activation, nn.Module):
        inner = activation._modules or activation._parameters or activation._buffers
        if inner or not probes.is_plain(activation):
            return None
        return _of_owner(activation, type(activation).forward, activation)
    if isinstance(activation, MethodType) and isinstance(activation.__self__, nn.Module):
        if not _is_elementwise(activation.__func__):
            return None
        return _of_owner(activation.__self__, activation.__func__, activation)
    function = activation.func if isinstance(activation, functools.partial) else activation
    if function is not gelu and not _is_elementwise(function):
        return None
    if activation not in _of_functions:
        _of_functions[activation] = _recognize(activation)
    return _of_functions[activation]


def _of_owner(owner: nn.Module, function: Any, activation: Any) -> Optional[str]:
    known = _of_modules.get(owner)
    if known is None or known[0] is not function:
        key = type(owner), function, probes.settings_of(owner)
        if key not in _of_classes:
            _of_classes[key] = _recognize(activation)
        _of_modules[owner] = known = function, _of_classes[key]
    return known[1]


def _is_elementwise(function: Any) -> bool:
    return isinstance(function, FunctionType) and bool(_ELEMENTWISE & {*function.__code__.co_names})


def is_unknown_activation(function: Any) -> bool:
    """Return whether a function of Python computes each element alone, as activations do, and no kernel computes it."""
    if not _is_elementwise(function) or activation_of(function) is not None:
        return False
    if function.__module__ == "torch.nn.functional":  # `sigmoid` and `tanh`, which scale more than they activate
        return False
    with probes.probing() as source:
        x = probes.random((4, 64), source)
        try:
            return probes.agree(function(x)[:, :32], function(x[:, :32]))
        except Exception:
            return False


def _recognize(activation: Any) -> Optional[str]:
    with probes.probing() as source:
        x = probes.random((4, 64), source) * torch.tensor([0.1, 1.0, 3.0, 8.0])[:, None]
        try:
            given = x.clone()
            own, lower = activation(given), activation(x.bfloat16())
        except Exception:
            return None
        if not torch.equal(given, x):  # in place: later readers of the input would get another
            return None
        for name, statement in _STATEMENTS.items():
            if probes.agree(own, statement(x)) and is_near(lower, statement(x)):
                return name
    return None


def is_near(lower: Any, exact: Tensor) -> bool:
    """Return whether an activation in bfloat16 is right to the roundings that one of a few operations has."""
    if not isinstance(lower, Tensor) or lower.dtype != torch.bfloat16:
        return False
    return bool(((lower.float() - exact).abs() <= 0.02 * exact.abs() + 0.01).all())


class _Activated(Deferred):
    """`activation(gate)`, with the kernels' name of it."""

    def __init__(self, name: str, activation: Any, gate: Tensor) -> None:
        self.name, self.activation, self.gate = name, activation, gate

    def computed(self) -> Tensor:
        return self.activation(self.gate)


def begun(activation: Any, gate: Any) -> Any:
    """Return `activation(gate)`."""
    name = activation_of(activation) if type(gate) in PLAIN_TENSORS else None
    return activation(gate) if name is None else _Activated(name, activation, gate)


def gated(activated: Any, up: Any) -> Any:
    """Return `activated * up`."""
    if pending(activated, _Activated):
        gate = activated.gate
        if fits(gate) and gate.dim() > 0 and is_like(up, gate):
            return product(activated.name, gate, up)
    return now(activated) * up


def gated_reversed(up: Any, activated: Any) -> Any:
    """Return `up * activated`, with the arguments in the order in which they are computed."""
    return gated(activated, up)


def product(name: str, gate: Tensor, up: Tensor) -> Tensor:
    joined, half = _joined(gate, up)
    if joined is None:
        return geglu.swiglu_pair(gate, up) if name == "silu" else geglu.geglu_pair(gate, up, name)
    if name == "silu":
        return geglu.swiglu(joined, gate=half)
    return geglu.geglu(joined, approximate=name, gate=half)


def _joined(gate: Tensor, up: Tensor) -> tuple[Optional[Tensor], str]:
    """Return the tensor whose halves are `gate` and `up`, if there is one, and which half is the gate."""
    strides, width = gate.stride(), gate.shape[-1]
    if strides != up.stride() or strides[-1] != 1 or gate.dim() < 2 or strides[-2] < 2 * width:
        return None, ""
    offsets = gate.storage_offset(), up.storage_offset()
    if abs(offsets[0] - offsets[1]) != width or not share_memory(gate, up):
        return None, ""
    half = "first" if offsets[0] < offsets[1] else "second"
    shape = (*gate.shape[:-1], 2 * width)
    if not (torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)):
        return gate.as_strided(shape, strides, min(offsets)), half
    base = gate._base  # so that gradients go to it
    fits = base is not None and base is up._base and base.shape == shape and base.stride() == strides
    return (base, half) if fits and base.storage_offset() == min(offsets) else (None, "")
