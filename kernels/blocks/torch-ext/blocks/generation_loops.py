"""Which models have their `generate` captured: the method of transformers that is its loop asks a `Decoder` first."""

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from .findings import Findings
from .generation import Decoder, GenerationCounts, generates

# By model. Not among the model's attributes, where copies and pickles would find them.
decoders: "weakref.WeakKeyDictionary[nn.Module, Decoder]" = weakref.WeakKeyDictionary()
# Other loops, which run as before: why.
_OTHER_LOOPS = {"_beam_search": "beams", "_assisted_decoding": "candidates of an assistant"}


def add_decoder(model: nn.Module, findings: Findings) -> GenerationCounts:
    """Let a model capture and replay decoding steps. Return its counts, which go on."""
    if model not in decoders:
        decoders[model] = Decoder(type(model), findings)
    return decoders[model].counts


def generating_in(model: Any) -> Any:
    """Return the module that generates: the model, or as in adapters one inside of it; None if there is none."""
    return next(filter(generates, model.modules()), None) if isinstance(model, nn.Module) else None


def loops_of(cls: Any) -> dict[str, Callable[..., Any]]:
    """Return the loops of `generate` of a class, which ask the decoder of a model that has one."""
    loops = {name: _counting(cls, name, reason) for name, reason in _OTHER_LOOPS.items() if hasattr(cls, name)}
    if not hasattr(cls, "_sample"):
        return loops

    # `generate` takes this method from the class, and reads its parameters.
    @functools.wraps(cls._sample)
    def sample(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        decoder = decoders.get(self)
        if decoder is None:
            return cls._sample(self, *args, **kwargs)
        with decoder.on_device_of(self):
            return decoder.sample(self, MethodType(cls.forward, self), MethodType(cls._sample, self), *args, **kwargs)

    return {**loops, "_sample": sample}


def _counting(cls: type, name: str, reason: str) -> Callable[..., Any]:
    method = getattr(cls, name)

    @functools.wraps(method)
    def counting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self in decoders:
            decoders[self].counts.eager[reason] += 1
        return method(self, *args, **kwargs)

    return counting
