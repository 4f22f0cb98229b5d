"""Decides for every call of a model whether it replays a CUDA graph, captures one, or runs eagerly."""

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_unflatten

from .calls import Call, Refused, is_value, take_apart
from .captures import Captures
from .gpu import Gpu, on_device_of
from .kernel_set import PLAIN_TENSORS, is_forward_mode, is_transformed
from .report import Report
from .snapshots import Snapshot

LIMIT = 8
# Shapes that were met but have no graph: enough for a loop over some buckets, and small.
_REMEMBERED = 64
# After so many forwards in a row that change the model, it is looked at again once in so many calls.
_CHANGES, _PERIOD = 4, 32


@dataclass
class _Graph:
    """A captured call.

    Attributes:
        replay: Runs it on `inputs`, into the tensors of `output`.
        inputs: For each tensor of the call: where its contents go.
        output: The structure of the result, with references in place of caches.
    """

    replay: Callable[[], None]
    inputs: list[Tensor]
    output: Any

    def launch(self) -> Any:
        def take_out(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.clone()
            return leaf() if isinstance(leaf, weakref.ref) else leaf

        self.replay()
        return tree_map(take_out, self.output)


@dataclass
class _Shape:
    """The calls that one graph can serve.

    Attributes:
        caches: The number of caches in their key.
        states: By cache, as of the first call. A snapshot holds a cache's tensors, and goes with the cache.
        graph: From the second call on.
        refused: Why there is none.
    """

    caches: int
    states: "weakref.WeakKeyDictionary[Any, Snapshot]"
    graph: Optional[_Graph] = None
    refused: Optional[str] = None


class GraphRunner(Captures):
    """Decides for every call of one model whether it replays a graph, captures one, or runs eagerly."""

    def __init__(self, model: nn.Module, report: Report, limit: int = LIMIT, gpu: Optional[Gpu] = None) -> None:
        super().__init__(type(model), report, gpu)
        self._limit = limit
        self._shapes: OrderedDict[Any, _Shape] = OrderedDict()  # the last used one last
        self._calls = 0
        self._changes = 0  # calls in a row that found the model changed
        self._change = ""
        if "forward" in vars(model) and "_hf_hook" not in vars(model):
            self.counts.note = "its forward was replaced by other code"
        with contextlib.suppress(Refused):  # it is noted
            self._device_of(model)

    def call(self, model: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of `forward(*args, **kwargs)`, the model's own forward."""
        with on_device_of(model):
            try:
                call = self._prepare(model, args, kwargs)
                with self._lock:
                    return self._run(model, call, forward, args, kwargs)
            except Refused as refused:
                self.counts.eager[str(refused)] += 1
            return forward(*args, **kwargs)

    def _prepare(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Call:
        self._calls += 1
        if self._changes > _CHANGES and self._calls % _PERIOD:
            raise Refused(self._change)  # a snapshot takes more time than some forwards
        device = self._device_of(model)
        if is_forward_mode() or is_transformed():
            raise Refused("forward-mode differentiation or a transform of torch.func is active")
        call = take_apart(args, kwargs, device, self._gpu.modes())
        tensors = (*call.tensors, *model.parameters()) if torch.is_grad_enabled() else ()
        if any(tensor.requires_grad for tensor in tensors):
            raise Refused("gradients are needed")
        return call

    def _run(self, model: nn.Module, call: Call, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a call. The second one in the same state of the model and the caches is captured.

        A forward that counts in Python, or fills a cache, is never captured: a replay would not count.
        """
        change = self._check_state(model, call.device)
        self._changes, self._change = (0, "") if change is None else (self._changes + 1, change)
        change = change or self._drop_outdated(call)
        shape = self._shapes.get(call.key)
        if shape is not None:
            self._shapes.move_to_end(call.key)
            if shape.refused is not None:
                raise Refused(shape.refused)
            if shape.graph is not None:
                with self._gpu.in_order(call.device):
                    for static, tensor in zip(shape.graph.inputs, call.tensors):
                        static.copy_(tensor)
                    self.counts.replays += 1
                    return shape.graph.launch()
            if hasattr(self._thread, "has_run"):
                try:
                    return self._capture_call(shape, call, forward)
                except Refused as refused:
                    shape.refused = str(refused)
                    raise
        states = weakref.WeakKeyDictionary({cache: Snapshot(cache, call.device) for cache in call.caches.values()})
        self.counts.eager[
            change or ("the first call of its shape" if shape is None else "the first call in its thread")
        ] += 1
        result = forward(*args, **kwargs)
        # cuBLAS and cuDNN make a handle at their first use in a thread, which a capture does not allow.
        self._thread.has_run = True
        self._shapes[call.key] = _Shape(len(states), states)
        self._drop(*list(self._shapes)[:-_REMEMBERED])
        return result

    def _drop_outdated(self, call: Call) -> Optional[str]:
        """Drop the graphs of caches that are gone, and those of the call's if they have changed. Return a change."""
        for key in [key for key, shape in self._shapes.items() if len(shape.states) < shape.caches]:
            self._drop(key)
        shape = self._shapes.get(call.key)
        for name, cache in call.caches.items() if shape is not None else ():
            difference = shape.states[cache].find_difference(cache)
            if difference is not None:
                self._drop(call.key)
                return f"{name}.{difference} has changed"
        return None

    def _capture_call(self, shape: _Shape, call: Call, forward: Callable) -> Any:
        inputs = [tensor.clone() for tensor in call.tensors]
        statics = iter(inputs)
        leaves = [next(statics) if type(leaf) in PLAIN_TENSORS else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.structure)
        replay, output = self._capture(
            forward, lambda run: run(*args, **kwargs), lambda output: output, call.device, not self._held()
        )
        graph = _Graph(replay, inputs, _output_of(output, call.caches))
        del output
        with self._gpu.in_order(call.device):
            result = graph.launch()
        shape.graph = graph
        self.counts.captured += 1
        self._drop(*self._held()[: -self._limit])
        return result

    def _held(self) -> list[Any]:
        """Return the keys of graphs, the last used one last."""
        return [key for key, shape in self._shapes.items() if shape.graph is not None]

    def _drop(self, *keys: Any) -> None:
        """Drop the graphs of some keys, and count the others."""
        if any(key in self._held() for key in keys):
            self._gpu.wait()
        for key in keys:
            self._shapes.pop(key, None)
        graphs = [self._shapes[key].graph for key in self._held()]
        self.counts.held = len(graphs)
        self.counts.memory = sum(static.nbytes for graph in graphs if graph is not None for static in graph.inputs)
        self.counts.memory += self._pool_bytes if graphs else 0

    def _forget(self) -> None:
        self._drop(*self._shapes)
        self._snapshot = None


def _output_of(output: Any, caches: dict[str, Any]) -> Any:
    """Return the structure of a captured output.

    Raises:
        Refused: If it holds something that a replay cannot make.
    """
    known = {id(cache) for cache in caches.values()}

    def check(leaf: Any) -> Any:
        if id(leaf) in known:
            return weakref.ref(leaf)
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise Refused("gradients are needed")
        if type(leaf) not in PLAIN_TENSORS and not is_value(leaf):
            raise Refused(f"its output holds a {type(leaf).__name__}, which a graph cannot make")
        return leaf

    return tree_map(check, output)
