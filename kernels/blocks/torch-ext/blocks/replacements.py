"""Faster forwards for modules of public classes, and how they are put into a module and taken out.

A replacement is put in front of the class of a module: `module.__class__` becomes a class made of both. Parameters,
hooks, `state_dict`, `isinstance`, copies and all other methods stay those of the module, and `super().forward` is its
own forward.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, Optional

from torch import nn

Mismatch = Callable[[nn.Module], Optional[str]]


@dataclass(frozen=True)
class Replacement:
    """A faster forward.

    Attributes:
        mixin: A class with a `forward` that takes the parameters of the module's own.
        does: What the forward computes with kernels, for the report.
        mismatch: Returns why a module of the class must keep its own forward, or None.
    """

    mixin: type
    does: str
    mismatch: Mismatch


_by_path: dict[str, Replacement] = {}


def replaces(*paths: str, does: str, mismatch: Mismatch = lambda module: None) -> Callable[[type], type]:
    """Register the decorated class as the replacement of the classes at `paths`, "package.module.Class" each.

    `mismatch` must check every attribute that the forward reads: the classes change with their libraries.
    """

    def register(mixin: type) -> type:
        for path in paths:
            _by_path[path] = Replacement(mixin, does, mismatch)
        return mixin

    return register


def path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def find(module: nn.Module) -> Optional[Replacement]:
    """Return the replacement for modules of this class, whether or not this module matches it."""
    return _by_path.get(path_of(type(module)))


def reason_to_keep(module: nn.Module, replacement: Replacement) -> Optional[str]:
    """Return why `module` must keep its own forward, or None."""
    if "forward" in module.__dict__ and not hasattr(module, "_hf_hook"):
        return "its forward was replaced by other code"
    if has_hooks(module):
        return "it has hooks"
    own = list(inspect.signature(type(module).forward).parameters)
    ours = list(inspect.signature(replacement.mixin.forward).parameters)
    if own != ours:
        return f"its forward has other parameters than expected: {', '.join(own[1:])}"
    try:
        return replacement.mismatch(module)
    except AttributeError as error:
        return f"it has another structure than expected: {error}"


def put(module: nn.Module, replacement: Replacement) -> None:
    """Give `module` the faster forward."""
    _set_class(module, _join(replacement.mixin, type(module)))


def take_out(module: nn.Module) -> None:
    """Give `module` its own class back, if it has a faster forward."""
    if is_replaced(module):
        _set_class(module, original_class(module))


def is_replaced(module: nn.Module) -> bool:
    return type(module) in _originals


def original_class(module: nn.Module) -> type:
    """Return the class that `module` has without a replacement."""
    return _originals.get(type(module), type(module))


def _set_class(module: nn.Module, cls: type) -> None:
    module.__class__ = cls
    # The hooks of accelerate, which move weights between devices, call the forward that they found.
    if "_old_forward" in module.__dict__:
        module._old_forward = MethodType(cls.forward, module)


class _Copied:
    """Makes pickles and copies of a module whose class is a joined one."""

    def __reduce_ex__(self, protocol: int) -> Any:
        # Pickled as a module of its own class, so that whoever loads it needs no kernels.
        _, _, *state = super().__reduce_ex__(protocol)
        return object.__new__, (original_class(self),), *state

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Copied":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


_originals: dict[type, type] = {}  # by joined class


@cache
def _join(mixin: type, original: type) -> type:
    # The names stay: libraries compare them, to place a model's blocks on devices for example.
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    joined = type(original.__name__, (_Copied, mixin, original), names)
    _originals[joined] = original
    return joined


# --- what forwards ask of the modules inside -------------------------------------------------------------------------


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


def is_own(module: nn.Module, *classes: type) -> bool:
    """Return whether a call of `module` would run the forward of one of `classes`, and nothing else.

    A forward must ask this at every call before it computes in place of a module inside: hooks, adapters and
    offloading may have been added since the replacement.
    """
    return isinstance(module, classes) and "forward" not in module.__dict__ and not has_hooks(module)
