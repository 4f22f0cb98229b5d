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
from .findings import Findings, GraphCounts
from .gpu import Gpu
from .kernel_set import PLAIN_TENSORS, is_forward_mode, is_transformed
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
        caches: The ids of the caches in its key.
    """

    replay: Callable[[], None]
    inputs: list[Tensor]
    output: Any
    caches: set[int]

    def launch(self) -> Any:
        def take_out(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.clone()
            return leaf() if isinstance(leaf, weakref.ref) else leaf

        self.replay()
        return tree_map(take_out, self.output)


class GraphRunner(Captures):
    """Decides for every call of one model whether it replays a graph, captures one, or runs eagerly."""

    counts: GraphCounts

    def __init__(self, model: nn.Module, findings: Findings, limit: int = LIMIT, gpu: Optional[Gpu] = None) -> None:
        super().__init__(type(model), findings, GraphCounts(), gpu)
        self._limit = limit
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._met: OrderedDict[Any, set[int]] = OrderedDict()  # with the ids of caches in the keys
        self._refused: OrderedDict[Any, str] = OrderedDict()
        # A snapshot holds a cache's tensors, and goes with the cache.
        self._caches: weakref.WeakKeyDictionary[Any, Snapshot] = weakref.WeakKeyDictionary()
        self._calls = 0
        self._changes = 0  # calls in a row that found the model changed
        self._change = ""
        if "forward" in vars(model) and "_hf_hook" not in vars(model):
            self.counts.note = "its forward was replaced by other code"
        with contextlib.suppress(Refused):  # it is noted
            self._device_of(model)

    def call(self, model: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of `forward(*args, **kwargs)`, the model's own forward."""
        with self.on_device_of(model):
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
        change = change or self._check_caches(call)
        graph = self._graphs.get(call.key)
        if graph is not None:
            self._graphs.move_to_end(call.key)
            with self._gpu.in_order(call.device):
                for static, tensor in zip(graph.inputs, call.tensors):
                    static.copy_(tensor)
                self.counts.replays += 1
                return graph.launch()
        if call.key in self._refused:
            raise Refused(self._refused[call.key])
        has_run, is_met = hasattr(self._thread, "has_run"), call.key in self._met
        if has_run and is_met:
            del self._met[call.key]
            try:
                return self._capture_call(model, call, forward)
            except Refused as refused:
                _remember(self._refused, call.key, str(refused))
                raise
        self.counts.eager[change or ("the first call in its thread" if is_met else "the first call of its shape")] += 1
        result = forward(*args, **kwargs)
        # cuBLAS and cuDNN make a handle at their first use in a thread, which a capture does not allow.
        self._thread.has_run = True
        _remember(self._met, call.key, {id(cache) for cache in call.caches.values()})
        return result

    def _check_caches(self, call: Call) -> Optional[str]:
        """Drop the graphs of caches that have changed or are gone. Return the name of a change, or None."""
        change = None
        for name, cache in call.caches.items():
            snapshot = self._caches.get(cache)
            if snapshot is not None and not snapshot.is_current(cache):
                change = f"{name}.{snapshot.find_difference(cache)} has changed"
                del self._caches[cache]
        known = {id(cache) for cache in self._caches}  # another cache may have the id of one that is gone
        for key in [key for key, graph in self._graphs.items() if not graph.caches <= known]:
            self._drop(key)
        for key in [key for key, caches in self._met.items() if not caches <= known]:
            del self._met[key]
        for cache in call.caches.values():
            if cache not in self._caches:
                self._caches[cache] = Snapshot(cache, call.device)
        return change

    def _capture_call(self, model: nn.Module, call: Call, forward: Callable) -> Any:
        inputs = [tensor.clone() for tensor in call.tensors]
        statics = iter(inputs)
        leaves = [next(statics) if type(leaf) in PLAIN_TENSORS else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.structure)
        replay, output = self._capture(
            forward, lambda run: run(*args, **kwargs), lambda output: output, call.device, not self._graphs
        )
        graph = _Graph(replay, inputs, _output_of(output, call.caches), {id(cache) for cache in call.caches.values()})
        del output
        with self._gpu.in_order(call.device):
            result = graph.launch()
        # The kernels have run once now: the result counts, whatever follows.
        if all(map(_has_same_bits, inputs, call.tensors)):
            self._graphs[call.key] = graph
            self.counts.captured += 1
            if len(self._graphs) > self._limit:
                self._drop(next(iter(self._graphs)))
            self._count_held()
            return result
        for static, tensor in zip(inputs, call.tensors):
            tensor.copy_(static)
        _remember(self._refused, call.key, "its forward writes into its arguments")
        self._gpu.wait()  # `graph` ends here
        return result

    def _drop(self, key: Any) -> None:
        self._gpu.wait()
        del self._graphs[key]
        self._count_held()

    def _forget(self) -> None:
        self._gpu.wait()
        self._graphs.clear()
        self._met.clear()
        self._refused.clear()
        self._caches.clear()
        self._snapshot = None
        self._count_held()

    def _count_held(self) -> None:
        self.counts.held = len(self._graphs)
        inputs = sum(static.nbytes for graph in self._graphs.values() for static in graph.inputs)
        self.counts.memory = inputs + self._pool_bytes if self._graphs else 0


def _remember(known: "OrderedDict[Any, Any]", key: Any, value: Any) -> None:
    known[key] = value
    if len(known) > _REMEMBERED:
        known.popitem(last=False)


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


def _has_same_bits(static: Tensor, tensor: Tensor) -> bool:
    """Return whether tensors are equal, where NaN is equal to itself."""
    first, second = (x.resolve_conj().reshape(-1).view(torch.uint8) for x in (static, tensor))
    return torch.equal(first, second)
