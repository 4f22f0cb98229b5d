"""Faster forwards for modules of public classes, and how they are put into a module and taken out.

A replacement is put in front of the class of a module: `module.__class__` becomes a class made of both. Parameters,
hooks, `state_dict`, `isinstance`, copies and all other methods stay those of the module, and `super().forward` is its
own forward.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, MethodType
from typing import Any, Optional, Union

from torch import nn

Mismatch = Callable[[nn.Module], Optional[str]]


@dataclass(frozen=True)
class Replacement:
    """A faster forward.

    Attributes:
        mixin: A class with a `forward` that takes the parameters of the module's own.
        does: What the forward computes with kernels, for the report.
        kernels: The names of the kernels that the forward calls, for the report.
        mismatch: Returns why a module of the class must keep its own forward, or None.
        renamed: Names that some releases of the library give parameters, by the names that the mixin gives them.
    """

    mixin: type
    does: str
    kernels: tuple[str, ...]
    mismatch: Mismatch
    renamed: Mapping[str, str] = field(default_factory=dict, compare=False)  # else it could not be hashed


_by_path: dict[str, Replacement] = {}


def replaces(
    *paths: str,
    does: str,
    kernels: tuple[str, ...],
    mismatch: Mismatch = lambda module: None,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[type], type]:
    """Register the decorated class as the replacement of the classes at `paths`, "package.module.Class" each.

    `kernels` names the kernels that the forward calls itself, without those of replaced modules inside. `mismatch` must
    check every attribute that the forward reads: the classes change with their libraries. The forward gets a parameter
    in `renamed` by its own name, whichever of the two names the library uses.
    """

    def register(mixin: type) -> type:
        for path in paths:
            _by_path[path] = Replacement(mixin, does, kernels, mismatch, renamed)
        return mixin

    return register


@functools.cache
def path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def find(module: nn.Module) -> Optional[Replacement]:
    """Return the replacement for modules of this class, whether or not this module matches it."""
    return _by_path.get(path_of(type(module)))


def replaced_base(module: nn.Module) -> Optional[type]:
    """Return the class that a module's class is derived from and that has a replacement, if there is one."""
    return next((cls for cls in type(module).__mro__[1:] if path_of(cls) in _by_path), None)


def reason_to_keep(module: nn.Module, replacement: Replacement) -> Optional[str]:
    """Return why `module` must keep its own forward, or None."""
    if _is_rewritten(module) and not hasattr(module, "_hf_hook"):
        return "its forward was replaced by other code"
    if has_hooks(module):
        return "it has hooks"
    own = list(inspect.signature(type(module).forward).parameters)
    ours = list(inspect.signature(replacement.mixin.forward).parameters)
    if own not in (ours, [replacement.renamed.get(name, name) for name in ours]):
        return f"its forward has other parameters than expected: {', '.join(own[1:])}"
    try:
        return replacement.mismatch(module)
    except AttributeError as error:
        return f"it has another structure than expected: {error}"


def put(module: nn.Module, replacement: Replacement) -> None:
    """Give `module` the faster forward."""
    set_class(module, _join(replacement, type(module)))


def take_out(module: nn.Module) -> None:
    """Give `module` its own class back, if it has a faster forward."""
    if replacement_in(module) is not None:
        set_class(module, _own_class(type(module)))


def replacement_in(module: nn.Module) -> Optional[Replacement]:
    """Return the replacement that was put into `module`, or None."""
    joined = _joined_in(type(module))
    return None if joined is None else _joined[joined][1]


def original_class(module: nn.Module) -> type:
    """Return the class that `module` had before its replacement, and before what wrapped its class since then."""
    joined = _joined_in(type(module))
    return type(module) if joined is None else _joined[joined][0]


def _is_bound(module: nn.Module, forward: Any) -> bool:
    """Return whether `forward` is the method of the class of `module`, bound to it."""
    return isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward


def _is_rewritten(module: nn.Module) -> bool:
    return "forward" in module.__dict__ and not _is_bound(module, module.__dict__["forward"])


def set_class(module: nn.Module, cls: type) -> None:
    """Set the class of a module, and of its forward where wrappers keep that bound."""
    # The hooks of accelerate, which move weights between devices, keep the bound forward that they found, and leave it
    # in the module when they are removed.
    bound = [name for name in ("forward", "_old_forward") if _is_bound(module, module.__dict__.get(name))]
    module.__class__ = cls
    for name in bound:
        module.__dict__[name] = MethodType(cls.forward, module)


class _Copied:
    """Makes pickles and copies of a module whose class is a joined one."""

    def __reduce_ex__(self, protocol: int) -> Any:
        # Pickled as a module of its own class, so that whoever loads it needs no kernels.
        _, _, *state = super().__reduce_ex__(protocol)
        return object.__new__, (_own_class(type(self)),), *state

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Copied":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


_joined: dict[type, tuple[type, Replacement]] = {}  # by joined class: the original class and what was put before it


@functools.cache
def _join(replacement: Replacement, original: type) -> type:
    signature = inspect.signature(original.forward)
    renamed = [(new, name) for name, new in replacement.renamed.items() if new in signature.parameters]

    @functools.wraps(replacement.mixin.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Wrappers keep the bound forward that they found, and call it after the module was restored, too.
        if not isinstance(self, joined):
            return original.forward(self, *args, **kwargs)
        for new, name in renamed:
            if new in kwargs:
                kwargs[name] = kwargs.pop(new)
        return replacement.mixin.forward(self, *args, **kwargs)

    forward.__signature__ = signature
    # The names stay: libraries compare them, to place a model's blocks on devices for example.
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    joined = type(original.__name__, (_Copied, replacement.mixin, original), {**names, "forward": forward})
    _joined[joined] = original, replacement
    return joined


def _joined_in(cls: type) -> Optional[type]:
    """Return the joined class that `cls` is or is derived from: `fully_shard` derives a class from that of a module."""
    return next((base for base in cls.__mro__ if base in _joined), None)


def _own_class(cls: type) -> type:
    """Return `cls` with the original class in place of the joined one."""
    if cls in _joined:
        return _joined[cls][0]
    if _joined_in(cls) is None:
        return cls
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, tuple(_own_class(base) for base in cls.__bases__), namespace)


# --- what forwards ask of the modules inside -------------------------------------------------------------------------


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


def is_own(module: nn.Module, *classes: Union[type, str]) -> bool:
    """Return whether a call of `module` would run the forward of one of `classes`, and nothing else.

    A forward must ask this at every call before it computes in place of a module inside: hooks, adapters and
    offloading may have been added since the replacement, or another module may have been put there. Classes may be
    given as paths, as in `replaces`. Classes derived from them are others, for their forwards may be.
    """
    paths = [cls if isinstance(cls, str) else path_of(cls) for cls in classes]
    return path_of(type(module)) in paths and not _is_rewritten(module) and not has_hooks(module)
