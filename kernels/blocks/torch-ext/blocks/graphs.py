"""CUDA graphs around whole models: captured at the second call of a shape, replayed from then on.

Models of transformers that generate get graphs of whole decoding steps, too (`generation.py`).

A replay starts all kernels of a forward with one launch, so the host no longer limits the speed. It repeats the
captured operations and runs no Python of the model. A graph therefore serves only calls whose arguments differ in the
contents of tensors alone (`calls.py`), while the model is in the captured state (`snapshots.py`). Everything else runs
the model's own forward, and the counts show the reasons.
"""

import functools
import weakref
from types import MethodType
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from .classes import derived, set_class
from .findings import Findings
from .generation import GenerationCounts
from .generation_loops import add_decoder, decoders, generating_in, loops_of
from .graph_runner import GraphCounts, GraphRunner

_DENOISERS = ("transformer", "transformer_2", "unet")

# By model. Not among the model's attributes, where copies and pickles would find them.
_runners: "weakref.WeakKeyDictionary[nn.Module, GraphRunner]" = weakref.WeakKeyDictionary()
_HELD: tuple[Any, ...] = _runners, decoders
_below: dict[type, type] = {}  # by class with graphs: the class without


def add_graphs(model: Any, findings: Findings) -> dict[str, GraphCounts]:
    """Let a model, or the denoisers of a pipeline, capture and replay CUDA graphs. Return their counts, which go on.

    The operations that the kernels replace in graphs are added to the findings.
    """
    if isinstance(model, nn.Module):
        roots = {type(model).__name__: model}
    else:
        roots = {name: model.components.get(name) for name in _DENOISERS}
    return {name: _add_to(root, findings) for name, root in roots.items() if isinstance(root, nn.Module)}


def add_generation(model: Any, findings: Findings) -> dict[str, GenerationCounts]:
    """Let the model that generates, if there is one, capture and replay decoding steps. Return its counts."""
    module = generating_in(model)
    if module is None:
        return {}
    _join(module)
    return {type(module).__name__: add_decoder(module, findings)}


def remove_graphs(module: nn.Module) -> None:
    """Undo `add_graphs` and `add_generation` for one module, and free its graphs."""
    for graphs in (_runners.pop(module, None), decoders.pop(module, None)):
        if graphs is not None:
            graphs.remove()
    if type(module) in _below:
        set_class(module, _below[type(module)])


def suspend_graphs(root: nn.Module) -> tuple[dict[nn.Module, Any], ...]:
    """Let the modules of a model run without their graphs, and return these, for `resume_graphs`."""
    return tuple({module: held.pop(module) for module in root.modules() if module in held} for held in _HELD)


def resume_graphs(suspended: tuple[dict[nn.Module, Any], ...]) -> None:
    """Undo `suspend_graphs`."""
    for held, graphs in zip(_HELD, suspended):
        held.update(graphs)


def _add_to(model: nn.Module, findings: Findings) -> GraphCounts:
    if model not in _runners:
        _runners[model] = GraphRunner(model, findings)
        _join(model)
    return _runners[model].counts


def _join(model: nn.Module) -> None:
    if type(model) not in _below:
        set_class(model, _with_graphs(type(model)))


@functools.cache
def _with_graphs(cls: Any) -> Any:
    """Return a class like `cls` whose forward asks the model's runner first."""

    # Libraries ask for the parameters of a model's forward: `wraps` keeps them.
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Copies of the model have no runner.
        runner = None if is_compiling() else _runners.get(self)
        if runner is None or (self in decoders and decoders[self].is_active()):
            return cls.forward(self, *args, **kwargs)
        return runner.call(self, MethodType(cls.forward, self), args, kwargs)

    joined = derived(cls, {"forward": forward, **loops_of(cls)})
    _below[joined] = cls
    return joined
