"""CUDA graphs around whole models: captured at the second call of a shape, replayed from then on.

A replay starts all kernels of a forward with one launch, so the host no longer limits the speed. It repeats what was
captured and runs no Python of the model. A graph therefore serves only calls whose arguments differ in the contents of
tensors alone (`calls.py`), while the model is in the state in which it was captured (`snapshots.py`). Everything else
runs the model's own forward, and the counts say why.
"""

import copyreg
import ctypes
import functools
import os
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .calls import PLAIN_TENSORS, Call, Refused, is_value, rebuild, take_apart
from .replacements import _set_class
from .snapshots import Snapshot

LIMIT = 8
# Shapes that were met but have no graph: enough for a loop over some buckets, and small.
_REMEMBERED = 64
_DENOISERS = ("transformer", "transformer_2", "unet")
_CUDA_ONLY = "the model is not on a CUDA device"


@dataclass
class GraphCounts:
    """What the CUDA graphs of one model have done so far.

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


def remove_graphs(module: nn.Module) -> None:
    """Undo `add_graphs` for one module, and free its graphs."""
    runner = _runners.pop(module, None)
    if runner is not None:
        runner.remove()
    if type(module) in _below:
        _set_class(module, _below[type(module)])


def _add_to(model: nn.Module) -> GraphCounts:
    if model not in _runners:
        _runners[model] = GraphRunner(model)
        if type(model) not in _below:
            _set_class(model, _with_graphs(type(model)))
    return _runners[model].counts


# By model. Not among the model's attributes, where copies and pickles would find them.
_runners: "weakref.WeakKeyDictionary[nn.Module, GraphRunner]" = weakref.WeakKeyDictionary()
_below: dict[type, type] = {}  # by class with graphs: the class without


@functools.cache
def _with_graphs(cls: type) -> type:
    """Return a class like `cls` whose forward asks the model's runner first."""

    # Libraries ask for the parameters of a model's forward: `wraps` keeps them.
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = super(joined, self).forward
        # Copies of the model have no runner.
        runner = None if is_compiling() else _runners.get(self)
        return own(*args, **kwargs) if runner is None else runner.call(self, own, args, kwargs)

    def reduce(self: nn.Module, protocol: int) -> Any:
        without = object.__new__(cls)
        without.__dict__ = self.__dict__
        make, *rest = without.__reduce_ex__(protocol)
        # pickle takes copyreg.__newobj__ only with the class of the object.
        return object.__new__ if make is copyreg.__newobj__ else make, *rest

    # The names stay: libraries compare them.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    joined = type(cls)(cls.__name__, (cls,), {**names, "forward": forward, "__reduce_ex__": reduce})
    _below[joined] = cls
    return joined


# --- what to run ------------------------------------------------------------------------------------------------------


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
    inputs: list["_Input"]
    output: Any
    caches: "_Caches"


class _Cache:
    """Stands for a cache in a captured output."""

    def __init__(self, name: str) -> None:
        self.name = name  # of the argument


class _Caches:
    """The caches among the arguments of a call, which are not kept alive, and their state."""

    def __init__(self, caches: dict[str, Any], device: torch.device) -> None:
        snapshots = {name: Snapshot(cache, device) for name, cache in caches.items()}
        # A snapshot holds what is in a cache: without the callback, the tensors would outlive the cache.
        self._references = [weakref.ref(cache, lambda _: snapshots.clear()) for cache in caches.values()]
        self._snapshots = snapshots

    def are(self, caches: dict[str, Any]) -> bool:
        """Return whether these are the same objects: a key has their ids, which others may get after them."""
        return all(reference() is cache for reference, cache in zip(self._references, caches.values()))

    def are_alive(self) -> bool:
        return all(reference() is not None for reference in self._references)

    def find_difference(self, caches: dict[str, Any]) -> Optional[str]:
        """Return the name of what has changed in the caches, or None."""
        if not self.are(caches):
            return next(iter(caches))
        for name, snapshot in self._snapshots.items():
            if not snapshot.is_current(caches[name]):
                return f"{name}.{snapshot.find_difference(caches[name])}"
        return None


class GraphRunner:
    """Decides for every call of one model whether it replays a graph, captures one, or runs eagerly."""

    def __init__(self, model: nn.Module, limit: int = LIMIT, gpu: Optional["Gpu"] = None) -> None:
        self.counts = GraphCounts()
        self._limit = limit
        self._gpu = gpu or Gpu()
        self._lock = threading.RLock()
        self._is_busy = False
        self._pool: Any = None
        self._pool_bytes = 0
        self._snapshot: Optional[Snapshot] = None
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._met: OrderedDict[Any, _Caches] = OrderedDict()
        self._refused: OrderedDict[Any, str] = OrderedDict()
        if self._device_of(model) is None:
            self.counts.note = _CUDA_ONLY
        elif "forward" in vars(model) and "_hf_hook" not in vars(model):
            self.counts.note = "its forward was replaced by other code"

    def call(self, model: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return what `forward(*args, **kwargs)`, the model's own forward, returns."""
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

    def remove(self) -> None:
        """Free all graphs. Calls that come later begin anew."""
        with self._lock:
            self._forget()
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
                self.counts.replays += 1
                return self._replay(graph, call)
            self._drop(call.key)
            reason = f"{difference} has changed"
        if call.key in self._refused:
            raise Refused(self._refused[call.key])
        met = self._met.pop(call.key, None)
        if met is None or not met.are(call.caches):
            return self._try(reason, model, call, forward, args, kwargs)
        try:
            return self._capture(model, call, forward, args, kwargs)
        except Refused as refused:
            _remember(self._refused, call.key, str(refused))
            raise

    def _check_state(self, model: nn.Module, device: torch.device) -> str:
        """Drop the graphs if the model has changed. Return why a call whose graph is missing now runs eagerly."""
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
        difference = caches.find_difference(call.caches)
        if not self._snapshot.is_current(model):
            difference = self._snapshot.find_difference(model)
            self._forget()
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
        replay, output, pool_bytes = self._gpu.capture(lambda: forward(*args, **kwargs), self._pool, call.device)
        graph = _Graph(replay, inputs, _output_of(output, call.caches), caches)
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

    def _replay(self, graph: _Graph, call: Call) -> Any:
        with self._gpu.in_order(call.device):
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


def _remember(known: "OrderedDict[Any, Any]", key: Any, what: Any) -> None:
    known[key] = what
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
        self._memory.copy_(tensor[self._once])

    def give_back(self, tensor: Tensor) -> None:
        tensor[self._once].copy_(self._memory)

    def holds(self, tensor: Tensor) -> bool:
        return torch.equal(_bits(self._memory), _bits(tensor[self._once]))


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor as integers: NaN is equal to itself then."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


# --- the GPU ----------------------------------------------------------------------------------------------------------

# Only one thread may capture at a time: captures share the state of the random number generator.
_capturing = threading.Lock()
# Graphs whose captures Torch could not end. Its allocator goes on referring to them.
_broken: list[torch.cuda.CUDAGraph] = []


class Gpu:
    """What the runner of one model asks of CUDA."""

    type = "cuda"

    def __init__(self) -> None:
        self._stream: Optional[torch.cuda.Stream] = None
        self._last: Optional[tuple[torch.cuda.Stream, torch.cuda.Event]] = None

    def find_obstacle(self, device: torch.device) -> Optional[str]:
        """Return why a call on `device` can neither be captured nor replayed now, or None."""
        if torch.cuda.current_device() != device.index:
            return "the current CUDA device is not that of the model"
        if torch.cuda.is_current_stream_capturing():
            return "the caller captures a graph"
        return "a capture could not be ended" if _broken else None

    def modes(self) -> tuple:
        """Return the global settings that kernels are chosen by."""
        autocast = torch.is_autocast_enabled("cuda")
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast and torch.get_autocast_dtype("cuda"),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            *_float32_precision(),
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        )

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any], pool: Any, device: torch.device) -> tuple[Callable[[], None], Any, int]:
        """Capture what `run` does. Return a function that repeats it, what `run` returned, and the memory it took.

        Raises:
            Refused: If it cannot be captured. Torch and CUDA are as before then.
        """
        if self._stream is None:
            # Not Torch's one stream for captures: cuBLAS has a workspace for each stream, and graphs that are captured
            # on one stream must not run at the same time.
            self._stream = torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        cause: Optional[BaseException] = None
        # Other threads may allocate and wait meanwhile.
        capture = torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local")
        with _capturing:
            try:
                # `graph` leaves its stream current if it fails to end the capture: the outer context resets it.
                with torch.cuda.stream(torch.cuda.current_stream(device)), capture, _autocast_without_cache():
                    before = torch.cuda.memory_reserved(device)
                    try:
                        output = run()
                    except BaseException as error:
                        cause = error
                        raise
                    used = torch.cuda.memory_reserved(device) - before
            except BaseException as error:
                if error is not cause and not _end_capture(graph, self._stream):
                    _broken.append(graph)
                if not isinstance(error, Exception):
                    raise
                name, text = type(cause or error).__name__, str(cause or error).strip().partition("\n")[0]
                cause = None  # its traceback has this frame, and with it the memory
                raise Refused(f"it cannot be captured: {name}: {text}") from None
        return graph.replay, output, max(used, 0)

    @contextmanager
    def in_order(self, device: torch.device) -> Iterator[None]:
        """Let the current stream wait for the last use of the graphs' memory, and record this one."""
        stream = torch.cuda.current_stream(device)
        if self._last is not None and self._last[0] != stream:
            stream.wait_event(self._last[1])
        yield
        event = self._last[1] if self._last is not None else torch.cuda.Event()
        event.record(stream)
        self._last = stream, event

    def wait(self) -> None:
        """Wait until the GPU has finished all replays."""
        if self._last is not None:
            self._last[1].synchronize()

    def release(self) -> None:
        """Give the memory of dropped graphs back."""
        if self._last is not None:
            torch.cuda.empty_cache()


def _float32_precision() -> tuple:
    """Return whether products of float32 use TF32. Torch 2.9 and later refuse the old names after a use of the new."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    return matmul.allow_tf32, cudnn.allow_tf32


def _autocast_without_cache() -> AbstractContextManager:
    """Return a context for a capture: the weights that autocast caches are freed when its context ends."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False)


def _end_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> bool:
    """Let Torch finish a capture that CUDA has ended with an error. Return whether that worked.

    `capture_end` raises CUDA's error before it tells the allocator and the random number generator that the capture is
    over. Then random numbers, and memory that several streams use, would be in the state of a capture for ever. It gets
    as far as that if it ends another, empty capture of the same stream.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        handle = ctypes.c_void_p(stream.cuda_stream)
        relaxed = 2
        if driver.cuStreamBeginCapture_v2(handle, relaxed) != 0:
            return False
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the graph is empty
            try:
                graph.capture_end()
            finally:
                if torch.cuda.is_current_stream_capturing():
                    driver.cuStreamEndCapture(handle, ctypes.byref(ctypes.c_void_p()))
        graph.reset()
        return True
    except (OSError, AttributeError, RuntimeError):
        return False
