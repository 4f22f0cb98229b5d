"""Decides for every call of a model whether it replays a CUDA graph, captures one, or runs eagerly."""

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .calls import Call, Refused, is_value, rebuild, take_apart
from .findings import Findings, Tally
from .fusions import fuse
from .gpu import Gpu
from .graph_times import GraphTimes
from .kernel_set import PLAIN_TENSORS, is_forward_mode, is_transformed
from .recording import Recording
from .snapshots import Snapshot

LIMIT = 8
# Shapes that were met but have no graph: enough for a loop over some buckets, and small.
_REMEMBERED = 64
# Calls that are left alone, at most, before a model whose forwards change it is looked at again.
_MOST_LEFT = 1024
_CUDA_ONLY = "the model is not on a CUDA device"


@dataclass
class GraphCounts:
    """Counts of one model's CUDA graphs so far.

    Attributes:
        captured: Graphs captured.
        held: Graphs that are ready now.
        replays: Calls that replayed a graph.
        eager: Calls that ran the model's own forward, by reason.
        memory: Bytes of GPU memory that the graphs hold: their pool, and copies of inputs.
        note: Why no graph can be captured as the model is now, or None.
    """

    captured: int = 0
    held: int = 0
    replays: int = 0
    eager: Counter[str] = field(default_factory=Counter)
    memory: int = 0
    note: Optional[str] = None

    def __str__(self) -> str:
        text = f"{self.captured} captured, {self.held} held in {self.memory / 2**20:.0f} MiB, {self.replays} replays"
        if self.note is not None:
            text += f"; none can be captured now: {self.note}"
        return "\n".join([text, *(f"{number:6} x eager: {reason}" for reason, number in self.eager.items())])


@dataclass
class _Graph:
    """A captured call.

    Attributes:
        replay: Runs it on `inputs`, into the tensors of `output`.
        inputs: For each tensor of the call: where its contents go.
        output: The structure of the result, with `_Cache` in place of a cache of the call.
        caches: The caches in its key, and their state.
        times: Of a replay and of an eager call.
    """

    replay: Callable[[], None]
    inputs: list["_Input"]
    output: Any
    caches: "_Caches"
    times: GraphTimes


class _Cache:
    """Stands for a cache in a captured output."""

    def __init__(self, name: str) -> None:
        self.name = name  # of the argument


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


class GraphRunner:
    """Decides for every call of one model whether it replays a graph, captures one, or runs eagerly."""

    def __init__(self, model: nn.Module, findings: Findings, limit: int = LIMIT, gpu: Optional[Gpu] = None) -> None:
        self.counts = GraphCounts()
        self._tally = Tally(type(model), findings)
        self._limit = limit
        self._gpu = gpu or Gpu()
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._is_busy = False
        self._pool: Any = None
        self._pool_bytes = 0
        self._snapshot: Optional[Snapshot] = None
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._met: OrderedDict[Any, _Caches] = OrderedDict()
        self._refused: OrderedDict[Any, str] = OrderedDict()
        self._changes = 0  # forwards in a row that have changed the model
        self._left = 0  # calls that run eagerly without a look at the model
        self._change = ""
        if self._device_of(model) is None:
            self.counts.note = _CUDA_ONLY
        elif "forward" in vars(model) and "_hf_hook" not in vars(model):
            self.counts.note = "its forward was replaced by other code"

    def call(self, model: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of `forward(*args, **kwargs)`, the model's own forward."""
        with self._gpu.on_device_of(model):
            return self._call(model, forward, args, kwargs)

    def _call(self, model: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            if self._left > 0:
                self._left -= 1
                raise Refused(self._change)
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

    def remove(self) -> None:
        """Free all graphs. Calls that come later begin anew."""
        with self._lock:
            self._forget()
            self._changes = self._left = 0
            self._gpu.release()

    def _device_of(self, model: nn.Module) -> Optional[torch.device]:
        weight = next(model.parameters(), None)
        return weight.device if weight is not None and weight.device.type == self._gpu.type else None

    def _prepare(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Call:
        device = self._device_of(model)
        if device is None:
            if self._snapshot is not None:
                self.remove()
            self.counts.note = _CUDA_ONLY
            raise Refused(_CUDA_ONLY)
        obstacle = self._gpu.find_obstacle(device)
        if obstacle is not None:
            raise Refused(obstacle)
        if is_forward_mode() or is_transformed():
            raise Refused("forward-mode differentiation or a transform of torch.func is active")
        call = take_apart(args, kwargs, device, self._gpu.modes())
        tensors = (*call.tensors, *model.parameters()) if torch.is_grad_enabled() else ()
        if any(tensor.requires_grad for tensor in tensors):
            raise Refused("gradients are needed")
        return call

    def _run(self, model: nn.Module, call: Call, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        reason = self._check_state(model, call.device)
        graph = self._graphs.get(call.key)
        if graph is not None:
            difference = graph.caches.find_difference(call.caches)
            if difference is None:
                self._graphs.move_to_end(call.key)
                return self._replay_if_faster(graph, call, forward, args, kwargs)
            self._drop(call.key)
            reason = f"{difference} has changed"
        if call.key in self._refused:
            raise Refused(self._refused[call.key])
        met = self._met.pop(call.key, None)
        if met is not None and not hasattr(self._thread, "has_run"):
            reason = "the first call in its thread"
        if met is None or not met.are(call.caches) or not hasattr(self._thread, "has_run"):
            return self._try(reason, model, call, forward, args, kwargs)
        try:
            return self._capture(model, call, forward, args, kwargs)
        except Refused as refused:
            _remember(self._refused, call.key, str(refused))
            raise

    def _check_state(self, model: nn.Module, device: torch.device) -> str:
        """Drop the graphs if the model has changed. Return why a call whose graph is missing now runs eagerly.

        This cannot wait until the replay is launched. A graph of an outdated state may write to tensors that outlive
        it, as those of a cache, and may read indices out of range, after which CUDA is of no use to the process.
        """
        reason = "the first call of its shape"
        if self._snapshot is not None and not self._snapshot.is_current(model):
            reason = f"the model has changed: {self._snapshot.find_difference(model)}"
            self._forget()
        if self._snapshot is None:
            self._snapshot = Snapshot(model, device)
            self.counts.note = self._snapshot.obstacle
        if self._snapshot.obstacle is not None:
            raise Refused(self._snapshot.obstacle)
        for key in [key for key, graph in self._graphs.items() if not graph.caches.are_alive()]:
            self._drop(key)
        return reason

    def _try(
        self, reason: str, model: nn.Module, call: Call, forward: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run a call eagerly, and find out whether a graph could take its place.

        A forward that counts in Python, or fills a cache, cannot be captured: a replay would not count. It cannot be
        attempted either: where a capture fails, the forward runs a second time.
        """
        caches = _Caches(call.caches, call.device)
        result = forward(*args, **kwargs)
        # cuBLAS and cuDNN make a handle at their first use in a thread, which a capture does not allow.
        self._thread.has_run = True
        difference = caches.find_difference(call.caches)
        if self._snapshot.is_current(model):
            self._changes = 0
        else:
            difference = self._snapshot.find_difference(model)
            self._forget()
            # The first forward may prepare something. Where all change the model, snapshots would take more time than
            # some models do, and lead to nothing.
            self._left = min(2**self._changes, _MOST_LEFT) if self._changes > 0 else 0
            self._changes, self._change = self._changes + 1, f"its forward changes {difference}"
        if difference is None:
            _remember(self._met, call.key, caches)
        self.counts.eager[reason if difference is None else f"its forward changes {difference}"] += 1
        return result

    def _capture(self, model: nn.Module, call: Call, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        inputs = [_Input(tensor) for tensor in call.tensors]
        for static, tensor in zip(inputs, call.tensors):
            static.fill(tensor)
        statics = iter(inputs)
        args, kwargs = rebuild(
            (args, kwargs), lambda leaf: next(statics).tensor if type(leaf) in PLAIN_TENSORS else leaf
        )
        caches = _Caches(call.caches, call.device)
        if not self._graphs:
            self._pool, self._pool_bytes = self._gpu.new_pool(), 0
        run = self._recorded(type(model), forward, args, kwargs, call.device)
        replay, output, pool_bytes = self._gpu.capture(lambda: run(*args, **kwargs), self._pool, call.device)
        graph = _Graph(replay, inputs, _output_of(output, call.caches), caches, GraphTimes(self._gpu.start_timing))
        del output
        with self._gpu.in_order(call.device):
            result = self._launch(graph, call)
        # The Python of the forward and its kernels have run once each now: the result counts, whatever follows.
        written = [tensor for static, tensor in zip(inputs, call.tensors) if not static.holds(tensor)]
        changed = caches.find_difference(call.caches)
        if written:
            for static, tensor in zip(inputs, call.tensors):
                static.give_back(tensor)
            _remember(self._refused, call.key, "its forward writes into its arguments")
        elif changed is None and self._snapshot.is_current(model):
            self._pool_bytes += pool_bytes
            self._graphs[call.key] = graph
            self.counts.captured += 1
            if len(self._graphs) > self._limit:
                self._drop(next(iter(self._graphs)))
            self._count_held()
            return result
        self._gpu.wait()  # `graph` ends here
        return result

    def _recorded(self, cls: type, forward: Callable, args: tuple, kwargs: dict[str, Any], device: Any) -> Callable:
        """Return a forward's recorded calls of Torch with the kernels among them, or where it has others, the forward.

        They are recorded during a capture, where transformers makes masks without a look at their elements.
        """
        if torch.is_autocast_enabled(self._gpu.type):  # it changes the dtypes of the model's own operations
            return forward
        recording = Recording(cls)
        self._gpu.dry_run(lambda: recording.record(forward, args, kwargs), device)
        if recording.obstacle is not None:
            self._tally.miss(f"no kernels in its graph: {recording.obstacle}")
            return forward
        misses = fuse(recording.module)
        self._tally.add(recording.module.graph, misses)
        return recording.run

    def _replay_if_faster(
        self, graph: _Graph, call: Call, forward: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        slower = graph.times.find_slower()
        if slower is not None:
            self._drop(call.key)
            self._gpu.release()
            _remember(self._refused, call.key, slower)
            raise Refused(slower)
        if graph.times.needs_eager():
            try:
                with graph.times.first("eager"):
                    result = forward(*args, **kwargs)
            except torch.cuda.OutOfMemoryError:
                pass  # there is memory for the graph, and not for an eager call beside it
            else:
                self.counts.eager["to compare its time with that of its graph"] += 1
                return result
        self.counts.replays += 1
        return self._replay(graph, call)

    def _replay(self, graph: _Graph, call: Call) -> Any:
        with self._gpu.in_order(call.device), graph.times.first("replay"):
            for static, tensor in zip(graph.inputs, call.tensors):
                static.fill(tensor)
            return self._launch(graph, call)

    def _launch(self, graph: _Graph, call: Call) -> Any:
        def take_out(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.clone()
            return call.caches[leaf.name] if isinstance(leaf, _Cache) else leaf

        graph.replay()
        return rebuild(graph.output, take_out)

    def _drop(self, key: Any) -> None:
        self._gpu.wait()
        del self._graphs[key]
        self._count_held()

    def _forget(self) -> None:
        """Drop everything that was found out about the model."""
        self._gpu.wait()
        self._graphs.clear()
        self._met.clear()
        self._refused.clear()
        self._snapshot = None
        self._count_held()

    def _count_held(self) -> None:
        self.counts.held = len(self._graphs)
        inputs = sum(static.bytes for graph in self._graphs.values() for static in graph.inputs)
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

    return rebuild(output, check)


class _Input:
    """A tensor at a fixed address, with the shape and the strides of an argument."""

    def __init__(self, like: Tensor) -> None:
        # A dimension of stride 0, as `expand` makes, is held once.
        self._once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in like.stride())
        self._is_expanded = 0 in like.stride()
        view = like[self._once]
        end = 0
        for stride, size in sorted((stride, size) for stride, size in zip(view.stride(), view.shape) if size > 1):
            if stride < end:
                raise Refused("elements of an argument share memory")
            end = stride * size
        self._memory = torch.empty_strided(view.shape, view.stride(), dtype=like.dtype, device=like.device)
        self.tensor = self._memory.expand(like.shape)
        self.bytes = self._memory.untyped_storage().nbytes()

    def fill(self, tensor: Tensor) -> None:
        self._memory.copy_(tensor[self._once] if self._is_expanded else tensor)

    def give_back(self, tensor: Tensor) -> None:
        tensor[self._once].copy_(self._memory)

    def holds(self, tensor: Tensor) -> bool:
        return torch.equal(_bits(self._memory), _bits(tensor[self._once]))


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor as integers: NaN is equal to itself then."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
