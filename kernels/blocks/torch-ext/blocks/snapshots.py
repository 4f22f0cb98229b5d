"""Finds out, before a CUDA graph is replayed, whether anything that was baked into the graph has changed."""

import enum
import logging
import types
import weakref
from collections import defaultdict, deque
from operator import eq, getitem, is_, itemgetter
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .kernel_set import PLAIN_TENSORS

# Attributes of every module that its forward does not depend on, without gradients.
_NOT_READ = {
    "_compiled_call_impl",
    "_non_persistent_buffers_set",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# At the root, these run outside of the forward. They hold the root, which a snapshot must not keep alive.
# The last two are for `generate` of transformers, which writes the second.
_AROUND_THE_ROOT = {"forward", "_old_forward", "_hf_hook", "_diffusers_hook", *_HOOKS}
_AROUND_THE_ROOT |= {"generation_config", "_previous_max_cache_length"}
_WEIGHTS = ("_parameters", "_buffers")
_OPAQUE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    enum.Enum,
    logging.Logger,
    weakref.ref,
    torch.dtype,
)
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_LIMIT = 100_000


class Snapshot:
    """The state of a module, or of another object, that its Python code may read.

    A graph repeats a forward with all numbers, choices and addresses that the forward found when it was captured. A
    snapshot holds their origins: the tree of modules and their classes, parameters and buffers with their
    addresses, hooks, and the attributes of every module and of every object in them (configurations, attention
    processors, adapters' scales), through lists, dictionaries and sets. `is_current` compares by identity, then by
    value: an attribute that is set to an equal value is no change. The contents of tensors on the GPU are left out,
    because a graph reads them anew; tensors on other devices are compared by their version.

    Not detected: changes of global variables, of attributes of classes except `forward`, of values in closures and in
    objects without `__dict__`, of a `__dict__` that is replaced as a whole, of global module hooks, of an active
    `TorchFunctionMode` or `TorchDispatchMode`; a number replaced by an equal one of another type (1 by 1.0); a
    parameter whose `.data` becomes another view of the same memory.

    Attributes:
        obstacle: Why no graph can be captured in this state, or None.
    """

    def __init__(self, root: Any, device: torch.device) -> None:
        """Take a snapshot of `root`, which graphs on `device` read. `root` itself is not kept alive."""
        self.obstacle: Optional[str] = None
        self._obstacle_at: Optional[str] = None  # the path of a module
        self._device = device
        self._root_class = type(root)
        self._root_attributes = _attributes_of_root(root)
        self._modules: list[nn.Module] = []
        self._dicts: list[dict] = []  # the attributes of modules and objects, without the root
        self._by_keys: dict[tuple, list[dict]] = defaultdict(list)
        self._containers: list[Any] = []
        self._copies: list[Any] = []
        self._empty: list[Any] = []
        self._addressed: list[Tensor] = []  # whose addresses a graph has
        self._owners: list[Any] = []
        self._keys: list[Any] = []
        self._tensors: list[Tensor] = []  # each is `owner[key]`
        self._on_host: list[tuple[Tensor, int]] = []  # with their versions
        self._names: dict[int, str] = {}  # by id of a dictionary or container that the snapshot holds
        self._walk(root)
        # From here on: the state that `is_current` compares with.
        self._classes = list(map(type, self._modules))
        self._forwards = [(cls, cls.forward) for cls in {*self._classes, self._root_class} if hasattr(cls, "forward")]
        self._sizes = list(map(len, self._dicts))
        # A key twice makes a tuple of one value: tuples compare by identity before they compare by value.
        twice = {keys: keys * 2 if len(keys) == 1 else keys for keys in self._by_keys if keys}
        getters = [(keys, itemgetter(*twice[keys]), self._by_keys[keys]) for keys in twice]
        self._groups = [(keys, get, dicts, list(map(get, dicts))) for keys, get, dicts in getters]
        self._addresses = list(map(Tensor.data_ptr, self._addressed))

    def is_current(self, root: Any) -> bool:
        """Return whether `root`, from which the snapshot was taken, is still in the same state.

        With an obstacle, return whether it is still there: nothing else matters then, and the walk ended at it.
        """
        # This runs before every replay: each line is a loop in C over a whole model.
        # `==` of tensors, or of NumPy's arrays, raises an error unless they are one object: then there is a change.
        # `_tensors` has those with one element, which `==` compares by value.
        # `==` compares a container that was replaced with its predecessor, so later changes of the new one count, too.
        try:
            if self.obstacle is not None:
                return self._has_same_obstacle(root)
            return (
                type(root) is self._root_class
                and _is_same_root(_attributes_of_root(root), self._root_attributes)
                and not any(self._empty)
                and list(map(type, self._modules)) == self._classes
                and all(cls.forward is forward for cls, forward in self._forwards)
                and list(map(len, self._dicts)) == self._sizes
                and all(all(map(eq, map(get, dicts), saved)) for _, get, dicts, saved in self._groups)
                and self._containers == self._copies
                and all(map(is_, map(getitem, self._owners, self._keys), self._tensors))
                and list(map(Tensor.data_ptr, self._addressed)) == self._addresses
                and all(tensor._version == version for tensor, version in self._on_host)
            )
        except Exception:
            return False

    def find_difference(self, root: Any) -> str:
        """Return the name of the changed part of `root`."""
        if self.obstacle is not None:
            return f"{self.obstacle!r} is no longer true"
        now = _attributes_of_root(root)
        for key in {**now, **self._root_attributes}:
            if key not in now or key not in self._root_attributes or not _is_same(now[key], self._root_attributes[key]):
                return key
        for module, cls in zip(self._modules, self._classes):
            if type(module) is not cls:
                return f"the class of {self._names[id(vars(module))]}"
        for cls, forward in self._forwards:
            if cls.forward is not forward:
                return f"the forward of {cls.__name__}"
        for keys, _, dicts, saved in self._groups:
            for attributes, values in zip(dicts, saved):
                then = dict(zip(keys, values))
                for key in {**attributes, **then}.keys() - _NOT_READ:
                    if key not in attributes or key not in then or not _is_same(attributes[key], then[key]):
                        return f"{self._names[id(attributes)]}.{key}"
        for container, copy in zip(self._containers + self._empty, self._copies + [None] * len(self._empty)):
            if container if copy is None else not _is_same(container, copy):
                return self._names[id(container)]
        changed = {id(tensor) for tensor, then in zip(self._addressed, self._addresses) if tensor.data_ptr() != then}
        changed.update(id(tensor) for tensor, then in self._on_host if tensor._version != then)
        for owner, key, tensor in zip(self._owners, self._keys, self._tensors):
            if owner[key] is not tensor or id(tensor) in changed:
                name = f"{self._names[id(owner)]}.{key}".lstrip(".")
                return f"the tensor {name}"
        return "its class" if type(root) is not self._root_class else "its parameters or buffers"

    def _has_same_obstacle(self, root: Any) -> bool:
        path = self._obstacle_at
        return path is None or self._find_obstacle(root.get_submodule(path), path) == self.obstacle

    # --- taking it ---------------------------------------------------------------------------------------------------

    def _walk(self, root: Any) -> None:
        seen = {id(root)}
        waiting: deque[tuple[Any, str]] = deque()

        def meet(owner: Any, key: Any, path: str) -> None:
            value = owner[key]
            if isinstance(value, Tensor):
                self._take_tensor(owner, key)
            elif id(value) not in seen and not isinstance(value, _OPAQUE):
                seen.add(id(value))
                waiting.append((value, path))

        def look_into(attributes: dict, path: str) -> None:
            self._names[id(attributes)] = path
            for key in attributes:
                if key not in _NOT_READ:
                    meet(attributes, key, f"{path}.{key}" if path else key)

        def record(attributes: dict) -> None:
            keys = tuple(key for key in attributes if key not in _NOT_READ)
            self._by_keys[keys].append(attributes)
            self._dicts.append(attributes)

        if isinstance(root, nn.Module):
            seen.update(id(vars(root).get(key)) for key in (*_WEIGHTS, "_modules"))
            self._take_module(root, "", waiting)
            if self.obstacle is not None:
                return
        look_into(self._root_attributes, "")
        while waiting:
            value, path = waiting.popleft()
            if isinstance(value, nn.Module):
                if id(vars(value)) in self._names:
                    continue  # shared by two modules
                seen.update(id(vars(value).get(key)) for key in (*_WEIGHTS, "_modules", *_HOOKS))
                self._modules.append(value)
                self._take_module(value, path, waiting)
                record(vars(value))
                look_into(vars(value), path)
            elif isinstance(value, (dict, list, tuple, set, frozenset)):
                keys = (
                    value if isinstance(value, dict) else range(len(value)) if isinstance(value, (list, tuple)) else ()
                )
                self._contain(value, path)
                for key in keys:
                    meet(value, key, f"{path}[{key!r}]")
            elif type(getattr(value, "__dict__", None)) is dict:
                record(vars(value))
                look_into(vars(value), path)
            if self.obstacle is None and len(seen) > _LIMIT:
                self.obstacle = f"it holds more than {_LIMIT} objects"
            if self.obstacle is not None:
                return

    def _take_module(self, module: nn.Module, path: str, waiting: "deque[tuple[Any, str]]") -> None:
        """Record the state of every module: parameters, buffers, submodules and hooks."""
        attributes = vars(module)
        self.obstacle = self._find_obstacle(module, path)
        if self.obstacle is not None:
            self._obstacle_at = path
            return
        for key in _WEIGHTS:
            self._contain(attributes[key], f"{path}.{key}" if path else key)
            for name, tensor in attributes[key].items():
                if tensor is not None:
                    self._addressed.append(tensor)
                    if tensor.numel() == 1:
                        self._take_tensor(attributes[key], name)
        for key in _HOOKS if path else ():
            self._names[id(attributes[key])] = f"{path}.{key}"
            self._empty.append(attributes[key])
        self._contain(attributes["_modules"], f"the modules of {path or 'the model'}")
        for name, child in attributes["_modules"].items():
            if child is not None:
                waiting.append((child, f"{path}.{name}" if path else name))

    def _take_tensor(self, owner: Any, key: Any) -> None:
        tensor = owner[key]
        self._owners.append(owner)
        self._keys.append(key)
        self._tensors.append(tensor)
        if type(tensor) in PLAIN_TENSORS:
            self._addressed.append(tensor)
        # A graph may have captured the value of a tensor on another device. A version changes when a tensor is written.
        if tensor.device != self._device and not tensor.is_inference():
            self._on_host.append((tensor, tensor._version))

    def _contain(self, container: Any, path: str) -> None:
        self._names[id(container)] = path
        if isinstance(container, (tuple, frozenset)):
            return
        if not container:
            self._empty.append(container)
            return
        kind = dict if isinstance(container, dict) else list if isinstance(container, list) else set
        self._containers.append(container)
        self._copies.append(kind(container))

    def _find_obstacle(self, module: nn.Module, path: str) -> Optional[str]:
        attributes = vars(module)
        wrapper = _WRAPPERS.intersection(cls.__name__ for cls in type(module).__mro__)
        if wrapper:
            return f"{path or 'it'} is a {min(wrapper)}"
        if "_parameters" not in attributes:
            return f"{path or 'it'} is a {type(module).__name__}, whose state Python does not see"
        if path and ("_hf_hook" in attributes or any(attributes[key] for key in _HOOKS)):
            return f"{path} has hooks"
        if path and "forward" in attributes:
            return f"the forward of {path} was replaced by other code"
        for key in _WEIGHTS:
            for name, tensor in attributes[key].items():
                if tensor is not None and type(tensor) not in PLAIN_TENSORS:
                    return f"{path}.{name} is a {type(tensor).__name__}".lstrip(".")
                if tensor is not None and tensor.device != self._device:
                    return f"{path}.{name} is on {tensor.device}, other parameters on {self._device}".lstrip(".")
        return None


def _attributes_of_root(root: Any) -> dict[str, Any]:
    if not isinstance(root, nn.Module):
        return dict(vars(root))
    left_out = _NOT_READ | _AROUND_THE_ROOT
    return {key: value for key, value in vars(root).items() if key not in left_out and not _is_method(value, root)}


def _is_method(value: Any, root: Any) -> bool:
    return type(value) is types.MethodType and value.__self__ is root


def _is_same_root(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return now.keys() == then.keys() and all(
        value is then[key] or _is_same(value, then[key]) for key, value in now.items()
    )


def _is_same(now: Any, then: Any) -> bool:
    try:
        return now is then or (not isinstance(then, Tensor) and bool(now == then))
    except Exception:
        return False
