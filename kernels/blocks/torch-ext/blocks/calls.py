"""The structure of a call's arguments and results: the key, the inputs and the outputs of a CUDA graph."""

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from .kernel_set import PLAIN_TENSORS

_VALUES = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_FLOATS = (float, complex)


class Refused(Exception):
    """No graph can serve the call. The text says why, for the report."""


@dataclass(frozen=True)
class Call:
    """The arguments of a call, taken apart.

    Attributes:
        device: Where the model is.
        key: Equal for calls that one graph can serve.
        tensors: All tensors, in the order of the structure.
        caches: Objects with state of their own, each named by its argument; the key has their identities.
    """

    device: torch.device
    key: Any
    tensors: list[Tensor]
    caches: dict[str, Any]


def take_apart(args: tuple, kwargs: dict[str, Any], device: torch.device, modes: tuple) -> Call:
    """Take apart the arguments of a call of a model on `device`, under global settings `modes`.

    Raises:
        Refused: If an argument is not a value that two calls can be compared by, or a tensor not on `device`.
    """
    tensors: list[Tensor] = []
    caches: dict[str, Any] = {}

    def describe(value: Any, name: str) -> Any:
        cls = type(value)
        if cls in PLAIN_TENSORS:
            if value.device != device:
                raise Refused(f"argument {name} is on {value.device}, the model on {device}")
            if value.layout is not torch.strided:
                raise Refused(f"argument {name} is a sparse tensor")
            tensors.append(value)
            return value.shape, value.stride(), value.dtype, value.requires_grad
        if cls in _VALUES or isinstance(value, enum.Enum):
            return cls, value  # the class, because True == 1 == 1.0
        if cls in _FLOATS:
            return cls, repr(value)  # 0.0 == -0.0
        container = _open(value)
        if container is not None:
            names = (*value,) if isinstance(value, dict) else range(len(container[0]))
            return cls, names, *(describe(part, f"{name}[{key!r}]") for key, part in zip(names, container[0]))
        # The protocol of transformers' caches: whether their tensors stay where they are.
        fixed = getattr(value, "is_compileable", None)
        if fixed is None or isinstance(value, type) or not hasattr(value, "__dict__"):
            raise Refused(f"argument {name} is a {cls.__name__}, which two calls cannot be compared by")
        if not fixed:
            raise Refused(f"argument {name} is a {cls.__name__}, whose tensors move: a StaticCache stays in place")
        caches[name] = value
        return cls, id(value)

    parts = [describe(value, str(index)) for index, value in enumerate(args)]
    parts += [(name, describe(value, name)) for name, value in kwargs.items()]
    return Call(device, (modes, *parts), tensors, caches)


def rebuild(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a structure like `value`, with `replace(leaf)` in place of everything that is not a container."""
    container = _open(value)
    if container is None:
        return replace(value)
    parts, make = container
    return make([rebuild(part, replace) for part in parts])


def _open(value: Any) -> Optional[tuple[Iterable, Callable[[list], Any]]]:
    """Return a container's elements, and a function that makes such a container; None if `value` is none."""
    cls = type(value)
    if cls is tuple or cls is list:
        return value, cls
    if cls is dict or cls is OrderedDict:
        return list(value.values()), lambda parts: cls(zip(value, parts))
    # The outputs of diffusers and transformers are dataclasses that are dictionaries, too.
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        return [getattr(value, name) for name in names], lambda parts: cls(**dict(zip(names, parts)))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value, cls._make
    return None


def is_value(leaf: Any) -> bool:
    """Return whether a leaf is a constant that a replayed call may return as it is."""
    return type(leaf) in _VALUES or type(leaf) in _FLOATS or isinstance(leaf, enum.Enum)
