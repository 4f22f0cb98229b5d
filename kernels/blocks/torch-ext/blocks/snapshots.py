"""Finds out, before a CUDA graph is replayed, whether anything that was baked into the graph has changed."""

import contextlib
import enum
import logging
import types
import weakref
from collections import deque
from collections.abc import Sequence
from operator import getitem, is_
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .kernel_set import PLAIN_TENSORS

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_RECORDERS = "transformers.utils.output_capturing"  # its hooks record the outputs of layers that a call asks for
_WEIGHTS = ("_parameters", "_buffers")
# Attributes of a module whose contents its forward does not depend on, without gradients.
_NOT_READ = {"_backward_hooks", "_backward_pre_hooks", "_non_persistent_buffers_set", "_compiled_call_impl"}
_NOT_READ |= {f"{name}_{kind}" for name in _HOOKS for kind in ("with_kwargs", "always_called")}
_NOT_READ |= {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
# At the root, these run outside of the forward. They hold the root, which a snapshot must not keep alive.
_AROUND_THE_ROOT = {"forward", "_old_forward", "_hf_hook", "_diffusers_hook", *_HOOKS}
_AROUND_THE_ROOT |= {"generation_config", "_previous_max_cache_length"}  # for `generate`, which writes the second
_OPAQUE = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(enum.Enum, logging.Logger, weakref.ref, torch.dtype, str, bytes, int, float, type(None)),
)
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


class Snapshot:
    """The state of a module, or of another object, that its Python code may read.

    A graph repeats a forward with all numbers, choices and addresses of its capture. A snapshot has shallow copies of
    dictionaries, lists and sets that hold them, and compares identities, values, addresses and, on the host, versions.
    """

    def __init__(self, root: Any, device: torch.device, unread: Sequence[str] = ()) -> None:
        """Take a snapshot of `root` for graphs on `device` that read no attribute in `unread`. It is not kept alive."""
        self.obstacle = _obstacle_in(root, device)  # why no graph can be captured in this state, or None
        self._device = device
        self._root_class = type(root)
        self._root = _attributes_of_root(root)  # as of the last call
        self._modules: list[nn.Module] = []
        self._containers: list[Any] = []
        self._names: list[str] = []  # of the containers
        self._owners: list[Any] = []
        self._keys: list[Any] = []
        self._tensors: list[Tensor] = []  # each is `owner[key]`
        if self.obstacle is None:
            self._walk(root, unread)
        kinds = (dict, list, set)
        self._copies: list[Any] = [next(kind(x) for kind in kinds if isinstance(x, kind)) for x in self._containers]
        pairs = [pair for pair in zip(self._containers, self._copies) if isinstance(pair[0], dict)]
        self._unread = [(*pair, key) for pair in pairs for key in unread if key in pair[0]]
        self._classes = list(map(type, self._modules))
        self._forwards = [(cls, cls.forward) for cls in {*self._classes, self._root_class} if hasattr(cls, "forward")]
        self._addressed = [tensor for tensor in self._tensors if type(tensor) in PLAIN_TENSORS]
        self._addresses = list(map(Tensor.data_ptr, self._addressed))
        self._on_host = [(x, x._version) for x in self._tensors if x.device != device and not x.is_inference()]

    def find_difference(self, root: Any) -> Optional[str]:
        """Return the name of a changed part of `root`, or None. With an obstacle, only its end is a change."""
        if self.obstacle is not None:
            is_there = _obstacle_in(root, self._device) == self.obstacle
            return None if is_there else f"{self.obstacle!r} is no longer true"
        self._root.clear()
        self._root.update(_attributes_of_root(root))
        for container, copy, key in self._unread:
            copy[key] = container.get(key)
        # This runs before every replay: each line is a loop in C over a whole model. `==` of different tensors, or of
        # NumPy's arrays, raises an error unless they have one element, whose identity the lines after it compare.
        with contextlib.suppress(Exception):
            if (
                type(root) is self._root_class
                and list(map(type, self._modules)) == self._classes
                and all(cls.forward is forward for cls, forward in self._forwards)
                and self._containers == self._copies
                and all(map(is_, map(getitem, self._owners, self._keys), self._tensors))
                and list(map(Tensor.data_ptr, self._addressed)) == self._addresses
                and all(tensor._version == version for tensor, version in self._on_host)
            ):
                return None
        return self._name_difference()

    def _name_difference(self) -> str:
        changed = {id(tensor) for tensor, then in zip(self._addressed, self._addresses) if tensor.data_ptr() != then}
        changed.update(id(tensor) for tensor, version in self._on_host if tensor._version != version)
        for name, container, copy in zip(self._names, self._containers, self._copies):
            entries = _entries_of(copy)
            if isinstance(copy, set) or _entries_of(container).keys() != entries.keys():
                if not _is_same(container, copy):
                    return name or "its attributes"
                continue
            for key, then in entries.items():
                if not _is_same(container[key], then) or id(then) in changed:
                    return f"{name}.{key}".lstrip(".")
        forwards = (cls.__name__ for cls, forward in self._forwards if cls.forward is not forward)
        return f"the forward of {name}" if (name := next(forwards, "")) else "the class of a module"

    def _walk(self, root: Any, unread: Sequence[str]) -> None:
        """Collect the containers and tensors below `root`, which stay alive with the snapshot: ids are theirs."""
        seen = {id(root)}
        waiting: deque[tuple[Any, str]] = deque([(self._root, "")])
        while waiting:
            container, name = waiting.popleft()
            if isinstance(container, nn.Module):
                self._modules.append(container)
            if not isinstance(container, (dict, list, tuple, set, frozenset)):
                container = getattr(container, "__dict__", ())
            if isinstance(container, (dict, list, set)):
                self._containers.append(container)
                self._names.append(name)
            for key, value in _entries_of(container).items():
                if isinstance(value, Tensor) and key not in unread:
                    self._owners.append(container)
                    self._keys.append(key)
                    self._tensors.append(value)
                elif id(value) not in seen and not isinstance(value, _OPAQUE) and key not in {*_NOT_READ, *unread}:
                    seen.add(id(value))
                    part = "" if key in ("_modules", *_WEIGHTS) else key
                    waiting.append((value, f"{name}.{part}".strip(".")))


def _entries_of(container: Any) -> dict[Any, Any]:
    """Return the values of a container by their keys or indices; a set has none."""
    if isinstance(container, (set, frozenset)):
        return {}
    return container if isinstance(container, dict) else dict(enumerate(container))


def _obstacle_in(root: Any, device: torch.device) -> Optional[str]:
    """Return why the first module below `root` that cannot be captured cannot, or None."""
    for name, module in root.named_modules() if isinstance(root, nn.Module) else ():
        attributes = vars(module)
        wrapper = _WRAPPERS.intersection(cls.__name__ for cls in type(module).__mro__)
        if wrapper:
            return f"{name or 'it'} is a {min(wrapper)}"
        if "_parameters" not in attributes:
            return f"{name or 'it'} is a {type(module).__name__}, whose state Python does not see"
        hooks = [hook for key in _HOOKS for hook in attributes[key].values() if hook.__module__ != _RECORDERS]
        if name and ("_hf_hook" in attributes or hooks):
            return f"{name} has hooks"
        if name and "forward" in attributes:
            return f"the forward of {name} was replaced by other code"
        for key, tensor in ((key, tensor) for kind in _WEIGHTS for key, tensor in attributes[kind].items()):
            if tensor is not None and type(tensor) not in PLAIN_TENSORS:
                return f"{name}.{key} is a {type(tensor).__name__}".lstrip(".")
            if tensor is not None and tensor.device != device:
                return f"{name}.{key} is on {tensor.device}, other parameters on {device}".lstrip(".")
    return None


def _attributes_of_root(root: Any) -> dict[str, Any]:
    left_out = {key for key, value in vars(root).items() if type(value) is types.MethodType and value.__self__ is root}
    left_out |= _NOT_READ | _AROUND_THE_ROOT if isinstance(root, nn.Module) else set()
    return {key: value for key, value in vars(root).items() if key not in left_out}


def _is_same(now: Any, then: Any) -> bool:
    try:
        return now is then or (not isinstance(then, Tensor) and bool(now == then))
    except Exception:
        return False
