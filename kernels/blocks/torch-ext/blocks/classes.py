"""Classes of modules that are derived from their own: only some methods differ.

Parameters, hooks, `state_dict`, `isinstance`, copies and all other methods stay those of the module.
"""

import copy
from types import MethodType
from typing import Any, SupportsIndex

from torch import nn


def set_class(module: nn.Module, cls: Any) -> None:
    """Set the class of a module, and of its forward where wrappers keep that bound."""
    # The hooks of accelerate, which move weights between devices, keep the bound forward that they found, and leave it
    # in the module when they are removed.
    bound = [name for name in ("forward", "_old_forward") if _is_bound(module, module.__dict__.get(name))]
    module.__class__ = cls
    for name in bound:
        module.__dict__[name] = MethodType(cls.forward, module)


def _is_bound(module: nn.Module, forward: Any) -> bool:
    """Return whether a forward is the bound method of the module's class."""
    own = type(module).forward
    return getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is own


def derived(cls: Any, attributes: dict[str, Any]) -> Any:
    """Return a class that is derived from `cls` and looks like it, with other attributes."""
    # The names stay: libraries compare them, to place a model's blocks on devices for example.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (_Derived, cls), {**names, "_blocks_original": cls, **attributes})


def original(cls: Any) -> Any:
    """Return `cls` with the original class in place of the derived one: `fully_shard` derives a class from that."""
    if "_blocks_original" in vars(cls):
        return cls._blocks_original
    if not hasattr(cls, "_blocks_original"):
        return cls
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, tuple(original(base) for base in cls.__bases__), namespace)


class _Derived:
    """The common part of derived classes."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # Pickled as a module of its own class, so that loading needs no kernels.
        reduced: Any = super().__reduce_ex__(protocol)
        return object.__new__, (original(type(self)),), *reduced[2:]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Derived":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied
