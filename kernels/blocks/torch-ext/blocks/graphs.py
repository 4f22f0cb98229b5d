"""Models whose forward, and whose `generate`, ask for CUDA graphs first: classes derived from the model's own.

A replay starts all kernels of a forward with one launch, so the host no longer limits the speed. It repeats the
captured operations and runs no Python of the model. A graph therefore serves only calls whose arguments differ in the
contents of tensors alone (`calls.py`), while the model is in the captured state (`snapshots.py`). Everything else runs
the model's own forward, and the counts show the reasons.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, SupportsIndex

from torch import nn
from torch.compiler import is_compiling

from .gpu import on_device_of
from .graph_runner import GraphRunner
from .kernel_set import is_off
from .report import GraphCounts, Report

# Loops of `generate` that run as before: why.
_OTHER_LOOPS = {"_beam_search": "beams", "_assisted_decoding": "candidates of an assistant"}

# By model. Not among the model's attributes, where copies and pickles would find them.
runners: "weakref.WeakKeyDictionary[nn.Module, GraphRunner]" = weakref.WeakKeyDictionary()
decoders: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()


def add_graphs(model: nn.Module, report: Report) -> GraphCounts:
    """Let a model capture and replay CUDA graphs. Return their counts, which go on.

    The operations that the kernels replace in graphs are added to the report.
    """
    if model not in runners:
        runners[model] = GraphRunner(model, report)
        _derive(model)
    return runners[model].counts


def add_generation(model: nn.Module, report: Report) -> dict[str, GraphCounts]:
    """Let the model that generates, or as in adapters one inside of it, capture decoding steps. Return its counts."""
    library = sys.modules.get("transformers.generation.utils")
    for module in model.modules() if library is not None else ():
        if not isinstance(module, library.GenerationMixin):
            continue
        if module not in decoders:
            from .generation import Decoder  # it imports transformers

            decoders[module] = Decoder(type(module), report)
            _derive(module)
        return {type(module).__name__: decoders[module].counts}
    return {}


def remove_graphs(module: nn.Module) -> None:
    """Undo `add_graphs` and `add_generation` for one module, and free its graphs."""
    for graphs in (runners.pop(module, None), decoders.pop(module, None)):
        if graphs is not None:
            graphs.remove()
    if isinstance(module, _Derived):
        _set_class(module, type(module)._blocks_original)


# --- classes ----------------------------------------------------------------------------------------------------------


class _Derived:
    """The common part of derived classes: copies and pickles are modules of the model's own class."""

    _blocks_original: Any

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return object.__new__, (self._blocks_original,), *reduced[2:]


def _derive(model: nn.Module) -> None:
    if not isinstance(model, _Derived):
        _set_class(model, _with_graphs(type(model)))


def _set_class(module: nn.Module, cls: Any) -> None:
    """Set the class of a module, and of its forward where wrappers keep that bound."""
    # The hooks of accelerate, which move weights between devices, keep the bound forward that they found, and leave it
    # in the module when they are removed.
    own = type(module).forward
    for name in ("forward", "_old_forward"):
        bound = vars(module).get(name)
        if getattr(bound, "__self__", None) is module and getattr(bound, "__func__", None) is own:
            vars(module)[name] = MethodType(cls.forward, module)
    module.__class__ = cls


@functools.cache
def _with_graphs(cls: Any) -> Any:
    """Return a class that looks like `cls`, whose forward and loops of `generate` ask for graphs first."""

    # Libraries ask for the parameters of a model's forward: `wraps` keeps them.
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Copies of the model have no runner.
        runner = None if is_compiling() or is_off() else runners.get(self)
        if runner is None or (self in decoders and decoders[self].is_active()):
            return cls.forward(self, *args, **kwargs)
        return runner.call(self, MethodType(cls.forward, self), args, kwargs)

    attributes = {"forward": forward, "_blocks_original": cls}
    attributes |= {name: _counting(cls, name) for name in _OTHER_LOOPS if hasattr(cls, name)}
    if hasattr(cls, "_sample"):
        # `generate` takes this method from the class, and reads its parameters.
        @functools.wraps(cls._sample)
        def sample(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            decoder = decoders.get(self)
            if decoder is None or is_off():
                return cls._sample(self, *args, **kwargs)
            with on_device_of(self):
                own = MethodType(cls._sample, self)
                return decoder.sample(self, MethodType(cls.forward, self), own, *args, **kwargs)

        attributes["_sample"] = sample
    # The names stay: libraries compare them, to place a model's blocks on devices for example.
    attributes |= {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(cls.__name__, (_Derived, cls), attributes)


def _counting(cls: type, name: str) -> Callable[..., Any]:
    method = getattr(cls, name)

    @functools.wraps(method)
    def counting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self in decoders:
            decoders[self].counts.eager[_OTHER_LOOPS[name]] += 1
        return method(self, *args, **kwargs)

    return counting
