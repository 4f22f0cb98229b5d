"""CUDA graphs around whole models: captured at the second call of a shape, replayed from then on.

Models of transformers that generate get graphs of whole decoding steps, too (`generation.py`).

A replay starts all kernels of a forward with one launch, so the host no longer limits the speed. It repeats what was
captured and runs no Python of the model. A graph therefore serves only calls whose arguments differ in the contents of
tensors alone (`calls.py`), while the model is in the state in which it was captured (`snapshots.py`). Everything else
runs the model's own forward, and the counts say why.
"""

import copyreg
import functools
import weakref
from collections.abc import Callable
from typing import Any, Optional

from torch import nn
from torch.compiler import is_compiling

from .generation import Decoder, GenerationCounts, generates
from .graph_runner import GraphCounts, GraphRunner
from .replacements import set_class

_DENOISERS = ("transformer", "transformer_2", "unet")


def add_graphs(model: Any, but: Optional[nn.Module] = None) -> dict[str, GraphCounts]:
    """Let a model, or the denoisers of a pipeline, capture and replay CUDA graphs. Return their counts, which go on.

    Args:
        model: A model or a pipeline.
        but: A model that gets no graphs.
    """
    if isinstance(model, nn.Module):
        roots = {type(model).__name__: model}
    else:
        roots = {name: model.components.get(name) for name in _DENOISERS}
    return {name: _add_to(root) for name, root in roots.items() if isinstance(root, nn.Module) and root is not but}


def add_generation(model: Any) -> dict[str, GenerationCounts]:
    """Let the models that generate capture and replay decoding steps. Return their counts, which go on.

    Args:
        model: A model, which may be one that generates or have one inside, as adapters do; or a pipeline.
    """
    if not isinstance(model, nn.Module):
        return {}
    module = next(filter(generates, model.modules()), None)
    return {} if module is None else {type(module).__name__: _add_generation_to(module)}


def remove_graphs(module: nn.Module) -> None:
    """Undo `add_graphs` and `add_generation` for one module, and free its graphs."""
    for graphs in (_runners.pop(module, None), _decoders.pop(module, None)):
        if graphs is not None:
            graphs.remove()
    if type(module) in _below:
        set_class(module, _below[type(module)])


def _add_to(model: nn.Module) -> GraphCounts:
    if model not in _runners:
        _runners[model] = GraphRunner(model)
        _join(model)
    return _runners[model].counts


def _add_generation_to(model: nn.Module) -> GenerationCounts:
    if model not in _decoders:
        _decoders[model] = Decoder()
        _join(model)
    return _decoders[model].counts


def _join(model: nn.Module) -> None:
    if type(model) not in _below:
        set_class(model, _with_graphs(type(model)))


# By model. Not among the model's attributes, where copies and pickles would find them.
_runners: "weakref.WeakKeyDictionary[nn.Module, GraphRunner]" = weakref.WeakKeyDictionary()
_decoders: "weakref.WeakKeyDictionary[nn.Module, Decoder]" = weakref.WeakKeyDictionary()
# Other loops of `generate`, which run as before: why.
_OTHER_LOOPS = {"_beam_search": "beams", "_assisted_decoding": "candidates of an assistant"}
_below: dict[type, type] = {}  # by class with graphs: the class without


def _counting(cls: type, name: str, reason: str) -> Callable[..., Any]:
    """Return the method `name` of `cls`, which counts its calls."""
    method = getattr(cls, name)

    @functools.wraps(method)
    def counting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self in _decoders:
            _decoders[self].counts.eager[reason] += 1
        return method(self, *args, **kwargs)

    return counting


@functools.cache
def _with_graphs(cls: type) -> type:
    """Return a class like `cls` whose forward asks the model's runner first."""

    # Libraries ask for the parameters of a model's forward: `wraps` keeps them.
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = super(joined, self).forward
        # Copies of the model have no runner.
        runner = None if is_compiling() else _runners.get(self)
        if runner is None or (self in _decoders and _decoders[self].is_active()):
            return own(*args, **kwargs)
        return runner.call(self, own, args, kwargs)

    def reduce(self: nn.Module, protocol: int) -> Any:
        without = object.__new__(cls)
        without.__dict__ = self.__dict__
        make, *rest = without.__reduce_ex__(protocol)
        # pickle takes copyreg.__newobj__ only with the class of the object.
        return object.__new__ if make is copyreg.__newobj__ else make, *rest

    # The names stay: libraries compare them.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    methods = {"forward": forward, "__reduce_ex__": reduce}
    if hasattr(cls, "_sample"):
        # `generate` takes this method from the class, and reads its parameters.
        @functools.wraps(cls._sample)
        def sample(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            above = super(joined, self)
            decoder = _decoders.get(self)
            if decoder is None:
                return above._sample(*args, **kwargs)
            return decoder.sample(self, above.forward, above._sample, *args, **kwargs)

        methods["_sample"] = sample
        methods.update(
            {name: _counting(cls, name, reason) for name, reason in _OTHER_LOOPS.items() if hasattr(cls, name)}
        )
    joined = type(cls)(cls.__name__, (cls,), {**names, **methods})
    _below[joined] = cls
    return joined
