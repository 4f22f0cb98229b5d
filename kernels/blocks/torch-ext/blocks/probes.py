"""Small random inputs for modules and functions, to observe their results, and to detect changes."""

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType
from typing import Any, Optional

import torch
from torch import Tensor, nn

_SETTINGS = (type(None), bool, int, float, str, tuple, torch.dtype, torch.Size)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def probing() -> Iterator[torch.Generator]:
    """Give out a source of random numbers for probes, which change neither Torch's own nor any other state."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        warnings.simplefilter("ignore")
        with torch.autocast("cpu", enabled=False):
            yield torch.Generator().manual_seed(0)


def random(shape: Any, source: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=source, dtype=torch.float32, device="cpu").to(dtype)


def copied(module: nn.Module, parameters: dict[str, Optional[Tensor]]) -> nn.Module:
    """Return a module like `module`, without its hooks and with other parameters."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__.pop("forward", None)  # where a library that offloads puts a hook: it loads the parameters of `module`
    copy.__dict__.update({name: OrderedDict() for name in _HOOKS})
    copy.__dict__["_parameters"] = parameters
    return copy


def settings_of(module: nn.Module) -> Hashable:
    """Return the state on which a module without children depends, besides the values of its parameters."""
    settings = tuple(
        (name, value if isinstance(value, _SETTINGS) else id(value))
        for name, value in module.__dict__.items()
        if not name.startswith("_") and name != "training"
    )
    return settings, tuple((name, None if p is None else p.shape) for name, p in module._parameters.items())


def required_arguments(function: Callable) -> Optional[list[str]]:
    """Return the names of the parameters that a call must give, without `self`; None if they cannot be known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty and p.name != "self"]


def agree(actual: Any, expected: Tensor) -> bool:
    """Return whether two results are equal but for the order of sums, and the roundings that this may change."""
    if not isinstance(actual, Tensor) or actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if not bool(expected.isfinite().all()):
        return False
    eps = torch.finfo(expected.dtype).eps
    x, y = actual.double(), expected.double()
    if expected.dtype == torch.float32:
        return bool(((x - y).abs() <= 1e-5 * y.abs() + 1e-5 * y.abs().mean()).all())
    # Where a float32 sum in another order crosses the middle of two values, they are neighbours.
    near = (x - y).abs() <= 2 * eps * y.abs() + eps * y.abs().mean()
    return bool(near.all()) and (x == y).double().mean().item() > 0.97


class Watched:
    """The functions that calls run, as they are now: attributes of classes, and names of Python modules."""

    def __init__(self, cls: Optional[type] = None) -> None:
        self._cls = cls
        self._attributes: list[tuple[Any, str, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []

    def add_method(self, name: str) -> None:
        self._attributes.append((self._cls, name, getattr(self._cls, name)))

    def add_used(self, function: Any) -> None:
        """Watch a function's callees: methods of the class, and functions of its module."""
        if isinstance(function, nn.Module):  # kernels makes modules of functions
            self._attributes.append((type(function), "forward", type(function).forward))
            self._globals.append((function.__dict__, "forward", None))
            function = type(function).forward
        function = inspect.unwrap(function)
        if not isinstance(function, FunctionType):
            return
        for cell in function.__closure__ or ():
            if isinstance(_content(cell), FunctionType):
                self.add_used(_content(cell))
        for name in _names(function.__code__):
            used = None if hasattr(nn.Module, name) else getattr(self._cls, name, None)
            if isinstance(used, FunctionType) and (self._cls, name, used) not in self._attributes:
                self.add_method(name)
                self.add_used(used)
            used = function.__globals__.get(name)
            entry = function.__globals__, name, used
            if isinstance(used, FunctionType) and used.__globals__ is function.__globals__ and not self._has(entry):
                self._globals.append(entry)
                self.add_used(used)

    def _has(self, entry: tuple[dict[str, Any], str, Any]) -> bool:
        return any(names is entry[0] and name == entry[1] for names, name, _ in self._globals)

    def key(self) -> Hashable:
        return (*(value for _, _, value in self._attributes), *(value for _, _, value in self._globals))

    def are_unchanged(self) -> bool:
        for owner, name, value in self._attributes:
            if getattr(owner, name, None) is not value:
                return False
        for names, name, value in self._globals:  # noqa: SIM110 - `all` over a generator costs twice as much
            if names.get(name) is not value:
                return False
        return True


def watched_forward(cls: type) -> Watched:
    """Return the forward of a class and its callees, watched."""
    watched = Watched(cls)
    watched.add_method("forward")
    watched.add_used(cls.forward)
    return watched


def watched_function(function: Any) -> Watched:
    """Return a function's callees, watched."""
    watched = Watched()
    watched.add_used(function)
    return watched


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def is_bound(module: nn.Module, forward: Any) -> bool:
    """Return whether `forward` is the method of the class of `module`, bound to it."""
    return isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward


def is_rewritten(module: nn.Module) -> bool:
    """Return whether a call of `module` runs another forward than that of its class."""
    return "forward" in module.__dict__ and not is_bound(module, module.__dict__["forward"])


def is_plain(module: nn.Module) -> bool:
    """Return whether a call of `module` does nothing but run the forward of its class."""
    return not (is_rewritten(module) or has_hooks(module))


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )
