"""The structure of a call's arguments and results: the key, the inputs and the outputs of a CUDA graph."""

import enum
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path

from .kernel_set import PLAIN_TENSORS

_VALUES = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_FLOATS = (float, complex)


class Refused(Exception):
    """No graph can serve the call. The text says why, for the report."""


def refuse_if(*reasons: tuple[Any, Optional[str]]) -> None:
    """Raise `Refused` for the first of some conditions that is true, with its text for the report."""
    for is_true, reason in reasons:
        if is_true:
            raise Refused(reason)


@dataclass(frozen=True)
class Call:
    """The arguments of a call, taken apart."""

    device: torch.device  # of the model
    key: Any  # equal for calls that one graph can serve
    leaves: list[Any]  # all tensors, values and caches, in the order of the structure
    tensors: list[Tensor]  # among the leaves
    structure: TreeSpec  # of the arguments and the keyword arguments
    caches: dict[str, Any]  # objects with state of their own, by argument; the key has their identities


def take_apart(args: tuple, kwargs: dict[str, Any], device: torch.device, modes: tuple) -> Call:
    """Take apart a call of a model on `device`, under global settings `modes`; or raise `Refused`."""
    leaves, structure = tree_flatten((args, kwargs))
    caches: dict[str, Any] = {}

    def describe(index: int, value: Any) -> Any:
        cls = type(value)
        if cls in PLAIN_TENSORS and value.layout is torch.strided and value.device == device:
            return value.shape, value.stride(), value.dtype, value.requires_grad
        if is_value(value):
            return cls, repr(value) if cls in _FLOATS else value  # True == 1 == 1.0, and 0.0 == -0.0
        (_, first, *path), _ = tree_flatten_with_path((args, kwargs))[0][index]
        name = f"{getattr(first, 'key', getattr(first, 'idx', ''))}{keystr(tuple(path))}"
        # The protocol of transformers' caches: whether their tensors stay where they are.
        fixed = None if isinstance(value, type) else getattr(value, "is_compileable", None)
        if fixed:
            caches[name] = value
            return cls, id(value)
        if cls in PLAIN_TENSORS and value.device != device:
            raise Refused(f"argument {name} is on {value.device}, the model on {device}")
        reason = "which two calls cannot be compared by" if fixed is None else "whose tensors move: use a StaticCache"
        raise Refused(f"argument {name} is a {cls.__name__}, {reason}")

    parts = tuple(describe(index, leaf) for index, leaf in enumerate(leaves))
    tensors = [leaf for leaf in leaves if type(leaf) in PLAIN_TENSORS]
    return Call(device, (modes, str(structure), parts), leaves, tensors, structure, caches)


def is_value(leaf: Any) -> bool:
    """Return whether a leaf is a constant that a replayed call may return as it is."""
    return type(leaf) in _VALUES or type(leaf) in _FLOATS or isinstance(leaf, enum.Enum)
