"""Activations, recognised by what they compute, and their products with what they gate."""

import functools
import weakref
from collections.abc import Hashable
from types import FunctionType, MethodType
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from . import probes
from .kernel_set import DEVICE, geglu, share_memory, takes

_PLAIN = (Tensor, nn.Parameter)
# "silu", or for gelu the argument `approximate` of its kernels.
_STATEMENTS = {
    "silu": silu,
    "none": gelu,
    "tanh": lambda x: gelu(x, approximate="tanh"),
}

_of_modules: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Optional[str]]]" = weakref.WeakKeyDictionary()
_of_functions: dict[Any, Optional[str]] = {}
_of_classes: dict[Any, Optional[str]] = {}
# What the Python functions call that may be an activation. Others are not called to see: they may do anything.
_ELEMENTWISE = {"gelu", "silu", "sigmoid", "tanh", "erf", "pow", "square"}


def activation_of(activation: Any) -> Optional[str]:
    """Return what the kernels call an activation, a module or function, or None if it must be called."""
    if isinstance(activation, nn.Module):
        inner = activation._modules or activation._parameters or activation._buffers
        if inner or probes.has_hooks(activation) or probes.is_rewritten(activation):
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
        _of_functions[activation] = _recognise(activation)
    return _of_functions[activation]


def _of_owner(owner: nn.Module, function: Any, activation: Any) -> Optional[str]:
    known = _of_modules.get(owner)
    if known is None or known[0] is not function:
        key = type(owner), function, probes.settings_of(owner)
        if key not in _of_classes:
            _of_classes[key] = _recognise(activation)
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


def _recognise(activation: Any) -> Optional[str]:
    with probes.probing() as source:
        x = probes.random((4, 64), source) * torch.tensor([0.1, 1.0, 3.0, 8.0])[:, None]
        try:
            given = x.clone()
            own, lower = activation(given), activation(x.bfloat16())
        except Exception:
            return None
        if not torch.equal(given, x):  # in place: whoever reads the input later would get another
            return None
        for name, statement in _STATEMENTS.items():
            if probes.agree(own, statement(x)) and _is_near(lower, statement(x)):
                return name
    return None


def _is_near(lower: Any, exact: Tensor) -> bool:
    """Return whether an activation in bfloat16 is right to the roundings that one of a few operations has."""
    if not isinstance(lower, Tensor) or lower.dtype != torch.bfloat16:
        return False
    return bool(((lower.float() - exact).abs() <= 0.02 * exact.abs() + 0.01).all())


def begun(activation: Any, gate: Any) -> Any:
    """Return what `gated` gets: the activation and its input, or its result if it must be called, and called now."""
    name = activation_of(activation) if type(gate) in _PLAIN else None
    return activation(gate) if name is None else (name, activation, gate)


def gated(activated: Any, up: Any) -> Any:
    """Return `activated * up`, where `begun` returned `activated`."""
    if type(activated) is not tuple:
        return activated * up
    name, activation, gate = activated
    if (
        type(up) in _PLAIN
        and gate.dtype == up.dtype
        and gate.shape == up.shape
        and gate.dim() > 0
        and takes(gate)
        and gate.device == up.device
    ):
        return product(name, gate, up)
    return activation(gate) * up


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


# --- GELU in the epilogue of a projection -----------------------------------------------------------------------------

# Torch has no documented function for it. The schemas of ATen's ops stay compatible.
_ADDMM_ACTIVATION = getattr(torch.ops.aten, "_addmm_activation", None)
HAS_EPILOGUE = DEVICE == "cuda" and _ADDMM_ACTIVATION is not None


def gelu_fits_epilogue(projection: nn.Module, x: Tensor) -> bool:
    """Return whether `linear_gelu` may compute in place of `projection` and a GELU with the tanh approximation.

    The epilogue has no gradient. On the CPU it computes the exact GELU. Without a bias, Torch does not use it.
    """
    if not (HAS_EPILOGUE and takes(x) and x.dtype != torch.float32 and x.dim() > 1):
        return False
    return is_plain_linear(projection, x.dtype) and not (
        torch.is_grad_enabled()
        and (x.requires_grad or projection.weight.requires_grad or projection.bias.requires_grad)
    )


def is_plain_linear(projection: Any, dtype: torch.dtype) -> bool:
    """Return whether `projection` is nothing but a `torch.nn.Linear` with a bias and parameters of `dtype`."""
    return (
        type(projection) is nn.Linear
        and "forward" not in projection.__dict__
        and not probes.has_hooks(projection)
        and type(projection.weight) in _PLAIN
        and projection.weight.dtype == dtype
        and type(projection.bias) in _PLAIN
        and projection.bias.dtype == dtype
    )


def linear_gelu(projection: nn.Module, x: Tensor) -> Tensor:
    """Return `gelu(projection(x), approximate="tanh")`, with the GELU in the epilogue of the matrix multiplication."""
    rows = x.flatten(0, -2)
    out = _ADDMM_ACTIVATION.default(projection.bias, rows, projection.weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], out.shape[-1])


def activated_projection(activation: Any, projection: Any, x: Any) -> Any:
    """Return `activation(projection(x))`, in one kernel if the activation fits the epilogue of the projection."""
    if HAS_EPILOGUE and type(x) in _PLAIN and gelu_fits_epilogue(projection, x) and activation_of(activation) == "tanh":
        return linear_gelu(projection, x)
    return activation(projection(x))


_projections: dict[Hashable, bool] = {}


def projection_in(module: nn.Module) -> Optional[str]:
    """Return the name of the projection in a module that computes `gelu(projection(x), approximate="tanh")`, or None.

    None, too, where Torch has no such epilogue.
    """
    cls = type(module)
    if not HAS_EPILOGUE or len(module._modules) != 1 or module._parameters or module._buffers:
        return None
    ((name, projection),) = module._modules.items()
    arguments = probes.required_arguments(cls.forward)
    if type(projection) is not nn.Linear or arguments is None or len(arguments) != 1:
        return None
    key = cls, probes.watched_forward(cls).key(), probes.settings_of(module)
    if key not in _projections:
        _projections[key] = _is_gelu_of_projection(module, name)
    return name if _projections[key] else None


def _is_gelu_of_projection(module: nn.Module, name: str) -> bool:
    with probes.probing() as source:
        x, projection = probes.random((4, 16), source), nn.Linear(16, 24, dtype=torch.float32)
        for parameter in projection.parameters():
            parameter.copy_(probes.random(parameter.shape, source))
        exact = gelu(projection(x), approximate="tanh")
        copy = probes.copied(module, {})
        copy.__dict__["_modules"] = {name: projection}
        try:
            if not probes.agree(copy(x.clone()), exact):
                return False
            projection.bfloat16()
            lower = copy(x.bfloat16())
        except Exception:
            return False
        return _is_near(lower, gelu(projection.float()(x.bfloat16().float()), approximate="tanh"))
