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
# Calls that are left alone, at most, before a model whose forwards change it is looked at again.
_MOST_LEFT = 1024


@dataclass
class _Graph:
    """A captured call.

    Attributes:
        replay: Runs it on `inputs`, into the tensors of `output`.
        inputs: For each tensor of the call: where its contents go.
        output: The structure of the result, with `_Cache` in place of a cache of the call.
        caches: The caches in its key, and their state.
    """

    replay: Callable[[], None]
    inputs: list[Tensor]
    output: Any
    caches: "_Caches"

    def launch(self, call: Call) -> Any:
        def take_out(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.clone()
            return call.caches[leaf.name] if isinstance(leaf, _Cache) else leaf

        self.replay()
        return tree_map(take_out, self.output)


@dataclass(frozen=True)
class _Cache:
    """Stands for a cache in a captured output."""

    name: str  # of the argument


class _Caches:
    """The caches among the arguments of a call, which are not kept alive, and their state."""

    def __init__(self, caches: dict[str, Any], device: torch.device) -> None:
        snapshots = {name: Snapshot(cache, device) for name, cache in caches.items()}
        # A snapshot holds a cache's tensors: without the callback, the tensors would outlive the cache.
        self._references = [weakref.ref(cache, lambda _: snapshots.clear()) for cache in caches.values()]
        self._snapshots = snapshots

    def are(self, caches: dict[str, Any]) -> bool:
        """Return whether these are the same objects: a key has their ids, which others may get after them."""
        return all(reference() is cache for reference, cache in zip(self._references, caches.values()))

    def are_alive(self) -> bool:
        return all(reference() is not None for reference in self._references)

    def find_difference(self, caches: dict[str, Any]) -> Optional[str]:
        """Return the name of the changed part of the caches, or None."""
        if not self.are(caches):
            return next(iter(caches))
        for name, snapshot in self._snapshots.items():
            if not snapshot.is_current(caches[name]):
                return f"{name}.{snapshot.find_difference(caches[name])}"
        return None


class GraphRunner(Captures):
    """Decides for every call of one model whether it replays a graph, captures one, or runs eagerly."""

    counts: GraphCounts

    def __init__(self, model: nn.Module, findings: Findings, limit: int = LIMIT, gpu: Optional[Gpu] = None) -> None:
        super().__init__(type(model), findings, GraphCounts(), gpu)
        self._limit = limit
        self._is_busy = False
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._met: OrderedDict[Any, _Caches] = OrderedDict()
        self._refused: OrderedDict[Any, str] = OrderedDict()
        self._changes = 0  # forwards in a row that have changed the model
        self._left = 0  # calls that run eagerly without a look at the model
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
                    if self._is_busy:
                        raise Refused("the call comes from its own forward")
                    self._is_busy = True
                    try:
                        return self._run(model, call, forward, args, kwargs)
                    finally:
                        self._is_busy = False
            except Refused as refused:
                self.counts.eager[str(refused)] += 1
            return forward(*args, **kwargs)

    def _prepare(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Call:
        if self._left > 0:
            self._left -= 1
            raise Refused(self._change)
        device = self._device_of(model)
        if is_forward_mode() or is_transformed():
            raise Refused("forward-mode differentiation or a transform of torch.func is active")
        call = take_apart(args, kwargs, device, self._gpu.modes())
        tensors = (*call.tensors, *model.parameters()) if torch.is_grad_enabled() else ()
        if any(tensor.requires_grad for tensor in tensors):
            raise Refused("gradients are needed")
        return call

    def _run(self, model: nn.Module, call: Call, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        reason = self._check_state(model, call.device) or "the first call of its shape"
        for key in [key for key, graph in self._graphs.items() if not graph.caches.are_alive()]:
            self._drop(key)
        graph = self._graphs.get(call.key)
        if graph is not None:
            difference = graph.caches.find_difference(call.caches)
            if difference is None:
                self._graphs.move_to_end(call.key)
                with self._gpu.in_order(call.device):
                    for static, tensor in zip(graph.inputs, call.tensors):
                        static.copy_(tensor)
                    self.counts.replays += 1
                    return graph.launch(call)
            self._drop(call.key)
            reason = f"{difference} has changed"
        if call.key in self._refused:
            raise Refused(self._refused[call.key])
        met, has_run = self._met.pop(call.key, None), hasattr(self._thread, "has_run")
        if met is not None and has_run and met.are(call.caches):
            try:
                return self._capture_call(model, call, forward)
            except Refused as refused:
                _remember(self._refused, call.key, str(refused))
                raise
        return self._try(reason if met is None or has_run else "the first call in its thread", model, call, forward)

    def _try(self, reason: str, model: nn.Module, call: Call, forward: Callable) -> Any:
        """Run a call eagerly, and find out whether a graph could take its place.

        A forward that counts in Python, or fills a cache, cannot be captured: a replay would not count. It cannot be
        attempted either: where a capture fails, the forward runs a second time.
        """
        caches = _Caches(call.caches, call.device)
        args, kwargs = tree_unflatten(call.leaves, call.structure)
        result = forward(*args, **kwargs)
        # cuBLAS and cuDNN make a handle at their first use in a thread, which a capture does not allow.
        self._thread.has_run = True
        change, difference = self._change_in(model), caches.find_difference(call.caches)
        if change is not None:
            self._forget()
            # The first forward may prepare something. Where all change the model, snapshots would take more time than
            # some models do, and lead to nothing.
            self._left = min(2**self._changes, _MOST_LEFT) if self._changes > 0 else 0
            self._changes, self._change = self._changes + 1, change
        else:
            self._changes = 0
            if difference is None:
                _remember(self._met, call.key, caches)
            else:
                change = f"its forward changes {difference}"
        self.counts.eager[change or reason] += 1
        return result

    def _capture_call(self, model: nn.Module, call: Call, forward: Callable) -> Any:
        inputs = [tensor.clone() for tensor in call.tensors]
        statics = iter(inputs)
        leaves = [next(statics) if type(leaf) in PLAIN_TENSORS else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.structure)
        caches = _Caches(call.caches, call.device)
        replay, output = self._capture(
            forward, lambda run: run(*args, **kwargs), lambda output: output, call.device, not self._graphs
        )
        graph = _Graph(replay, inputs, _output_of(output, call.caches), caches)
        del output
        with self._gpu.in_order(call.device):
            result = graph.launch(call)
        # The Python of the forward and its kernels have run once each now: the result counts, whatever follows.
        if not all(map(_has_same_bits, inputs, call.tensors)):
            for static, tensor in zip(inputs, call.tensors):
                tensor.copy_(static)
            _remember(self._refused, call.key, "its forward writes into its arguments")
        elif caches.find_difference(call.caches) is None and self._change_in(model) is None:
            self._graphs[call.key] = graph
            self.counts.captured += 1
            if len(self._graphs) > self._limit:
                self._drop(next(iter(self._graphs)))
            self._count_held()
            return result
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
    names = {id(cache): name for name, cache in caches.items()}

    def check(leaf: Any) -> Any:
        if id(leaf) in names:
            return _Cache(names[id(leaf)])
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
