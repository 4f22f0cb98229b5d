"""Models whose forward, and whose `generate`, ask for CUDA graphs first: classes derived from the model's own.

A replay runs no Python of the model. It serves only calls that differ in the contents of tensors (`calls.py`), while
the model is in the captured state (`snapshots.py`). Other calls run the model's own forward, and are counted.
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
    """Let a model capture and replay CUDA graphs, which add to the report. Return their counts, which go on."""
    if model not in runners:
        runners[model] = GraphRunner(model, report)
        _set_class(model, _with_graphs(type(model)))
    return runners[model].counts


def add_generation(model: nn.Module, report: Report) -> dict[str, GraphCounts]:
    """Let the model that generates, or as in adapters one inside of it, capture decoding steps. Return its counts."""
    library: Any = sys.modules.get("transformers.generation.utils")
    version = getattr(sys.modules.get("transformers"), "__version__", "")
    if not version.startswith("4.57.") and not hasattr(library, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL"):
        return {}  # other releases decode otherwise
    module = next((part for part in model.modules() if isinstance(part, library.GenerationMixin)), None)
    if module is not None and module not in decoders:
        from .generation import Decoder  # it imports transformers

        decoders[module] = Decoder(type(module), report)
        _set_class(module, _with_graphs(type(module)))
    return {} if module is None else {type(module).__name__: decoders[module].counts}


def remove_graphs(module: nn.Module) -> None:
    """Undo `add_graphs` and `add_generation` for one module, and free its graphs."""
    for graphs in (runners.pop(module, None), decoders.pop(module, None)):
        if graphs is not None:
            graphs.remove()
    if isinstance(module, _Derived):
        _set_class(module, type(module)._blocks_original)


class _Derived:
    """The common part of derived classes: copies and pickles are modules of the model's own class."""

    _blocks_original: Any

    def __init_subclass__(cls) -> None:
        """Leave out that of the model's class, which may register classes or have arguments."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return object.__new__, (self._blocks_original,), *reduced[2:]


def _set_class(module: nn.Module, cls: Any) -> None:
    """Set the class of a module, and of its forward where wrappers keep that bound."""
    # accelerate's hooks keep the bound forward that they found, and leave it in the module when they are removed.
    own = type(module).forward
    for name in ("forward", "_old_forward"):
        bound = vars(module).get(name)
        if getattr(bound, "__self__", None) is module and getattr(bound, "__func__", None) is own:
            vars(module)[name] = MethodType(cls.forward, module)
    module.__class__ = cls


@functools.cache
def _with_graphs(cls: Any) -> Any:
    """Return a class that looks like `cls`, whose forward and loops of `generate` ask for graphs first."""
    if issubclass(cls, _Derived):
        return cls

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner = None if is_compiling() or is_off() else runners.get(self)  # copies of the model have none
        if runner is None or (self in decoders and decoders[self].is_active()):
            return cls.forward(self, *args, **kwargs)
        return runner.call(self, MethodType(cls.forward, self), args, kwargs)

    # Torch counts graphs and compares sizes by code object: under a user's `torch.compile`, classes share neither.
    forward.__code__ = forward.__code__.replace(co_name=f"{cls.__name__}_{id(cls)}")
    # Libraries ask for the parameters of a model's forward: `wraps` keeps them.
    attributes = {"forward": functools.wraps(cls.forward)(forward), "_blocks_original": cls}
    attributes |= {name: _loop(cls, name) for name in ("_sample", *_OTHER_LOOPS) if hasattr(cls, name)}
    # The names stay: libraries compare them, to place a model's blocks on devices for example.
    attributes |= {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(cls.__name__, (_Derived, cls), attributes)


def _loop(cls: Any, name: str) -> Callable[..., Any]:
    own = getattr(cls, name)

    # `generate` takes this method from the class, and reads its parameters.
    @functools.wraps(own)
    def loop(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        decoder = None if is_off() else decoders.get(self)
        if decoder is not None and name == "_sample":
            with on_device_of(self):
                return decoder.sample(self, MethodType(cls.forward, self), MethodType(own, self), *args, **kwargs)
        if decoder is not None:
            decoder.counts.eager[_OTHER_LOOPS[name]] += 1
        return own(self, *args, **kwargs)

    return loop
