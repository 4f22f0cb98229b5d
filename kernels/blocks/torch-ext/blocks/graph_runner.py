"""Decides for every call of a model whether it replays a CUDA graph, captures one, or runs eagerly."""

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only, tree_unflatten

from .calls import Call, Refused, is_value, refuse_if, take_apart
from .decoding import fuse_step
from .fusions import fuse
from .gpu import Gpu, on_device_of
from .kernel_set import PLAIN_TENSORS, is_forward_mode, is_transformed, is_watched
from .recording import record
from .report import GraphCounts, Report
from .snapshots import Snapshot

LIMIT = 8
_REMEMBERED = 64  # shapes, also without graphs: enough for a loop over some buckets, and small
# After so many forwards in a row that change the model, it is looked at again once in so many calls.
_CHANGES, _PERIOD = 4, 32


class Captures:
    """The graphs of one model, all of them captured in the same state of the model, and their counts for the report."""

    def __init__(self, cls: type, report: Report, gpu: Optional[Gpu] = None, unread: Sequence[str] = ()) -> None:
        """Capture a model of class `cls`, whose graphs do not depend on the attributes `unread` of its modules."""
        self.counts = GraphCounts()
        self._cls, self._report, self._gpu, self._unread = cls, report, gpu or Gpu(), unread
        self._lock, self._thread = threading.RLock(), threading.local()
        self._pool: Any = None
        self._pool_bytes = 0
        self._snapshot: Optional[Snapshot] = None

    def remove(self) -> None:
        """Free all graphs. Calls that come later begin anew."""
        with self._lock:
            self._forget()
            self._gpu.release()

    def _forget(self) -> None:
        """Drop everything that was found out about the model, when the GPU has finished."""
        raise NotImplementedError

    def _device_of(self, model: nn.Module) -> torch.device:
        """Return the device of a model. Raise `Refused` if nothing can be captured or replayed there now."""
        weight = next(model.parameters(), None)
        if weight is None or weight.device.type != self._gpu.type:
            if self._snapshot is not None:
                self.remove()
            self.counts.note = "the model is not on a CUDA device"
            raise Refused(self.counts.note)
        obstacle = self._gpu.find_obstacle(weight.device)
        refuse_if((obstacle, obstacle))
        return weight.device

    def _check_state(self, model: nn.Module, device: torch.device) -> Optional[str]:
        """Drop the graphs if the model has changed. Return the name of the change, or None.

        This cannot wait until the replay is launched: a graph of an outdated state may write to tensors that outlive
        it, and may read indices out of range, after which CUDA is of no use to the process.
        """
        difference = None if self._snapshot is None else self._snapshot.find_difference(model)
        if difference is not None:
            self._forget()
        if self._snapshot is None:
            self._snapshot = Snapshot(model, device, self._unread)
            self.counts.note = self._snapshot.obstacle
        refuse_if((self._snapshot.obstacle, self._snapshot.obstacle))
        return None if difference is None else f"the model has changed: {difference}"

    def _capture(
        self, forward: Callable, call: Callable, finish: Callable, device: torch.device, passes: Any = ()
    ) -> tuple[Callable[[], None], Any]:
        """Capture `finish(call(forward))`, with kernels by `fuse` and `passes`; if they are None, without kernels.

        Return a function that repeats it, and the result. Raise `Refused` if it cannot be captured.
        """
        if not self.counts.held:  # the memory of a pool without graphs is gone
            self._pool, self._pool_bytes = self._gpu.new_pool(), 0
        run, recordings = forward, []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            recordings.append(record(self._cls, forward, args, kwargs))
            return recordings[0].output

        if passes is not None:
            call(recorded)
            (recording,) = recordings
            refuse_if((recording.writes_inputs, "it cannot be captured: it writes into its arguments"))
            self._report.add(recording.module.graph, fuse(recording.module), self._cls)
            for replace in passes:
                replace(recording.module)
            run = recording.run
        replay, result, used = self._gpu.capture(lambda: finish(call(run)), self._pool, device)
        self._pool_bytes += used
        return replay, result


@dataclass
class _Shape:
    """The calls that one graph can serve."""

    caches: int  # in their key
    # By cache, as of the first call. A snapshot holds a cache's tensors, and goes with the cache.
    states: "weakref.WeakKeyDictionary[Any, Snapshot]"
    replay: Optional[Callable[[], None]] = None  # from the second call on
    inputs: Sequence[Tensor] = ()  # for each tensor of a call: where its contents go
    output: Any = None  # the structure of the result, with references in place of caches
    refused: Optional[str] = None  # why there is no graph

    def launch(self, replay: Callable[[], None]) -> Any:
        replay()
        copies = tree_map_only(Tensor, torch.clone, self.output)
        return tree_map_only(weakref.ref, lambda cache: cache(), copies)


class GraphRunner(Captures):
    """Decides for every call of one model whether it replays a graph, captures one, or runs eagerly."""

    def __init__(self, model: nn.Module, report: Report, limit: int = LIMIT, gpu: Optional[Gpu] = None) -> None:
        super().__init__(type(model), report, gpu)
        self._limit = limit
        self._shapes: OrderedDict[Any, _Shape] = OrderedDict()  # the last used one last
        self._calls = self._changes = 0  # changes: calls in a row that found the model changed
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
        is_special = is_watched() or is_forward_mode() or is_transformed()
        refuse_if((is_special, "a function mode, forward-mode differentiation or a transform of torch.func is active"))
        call = take_apart(args, kwargs, device, self._gpu.modes())
        tensors = (*call.tensors, *model.parameters()) if torch.is_grad_enabled() else ()
        refuse_if((any(tensor.requires_grad for tensor in tensors), "gradients are needed"))
        return call

    def _run(self, model: nn.Module, call: Call, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a call. The second one in a state of the model and the caches, which no replay changes, is captured."""
        change = self._check_state(model, call.device)
        self._changes, self._change = (0, "") if change is None else (self._changes + 1, change)
        change = change or self._drop_outdated(call)
        shape = self._shapes.get(call.key)
        if shape is not None:
            self._shapes.move_to_end(call.key)
            refuse_if((shape.refused is not None, shape.refused))
            if shape.replay is not None:
                with self._gpu.in_order(call.device):
                    for static, tensor in zip(shape.inputs, call.tensors):
                        static.copy_(tensor)
                    self.counts.replays += 1
                    return shape.launch(shape.replay)
            if hasattr(self._thread, "has_run"):
                try:
                    return self._capture_call(shape, call, forward)
                except Refused as refused:
                    shape.refused = str(refused)
                    raise
        states = weakref.WeakKeyDictionary({cache: Snapshot(cache, call.device) for cache in call.caches.values()})
        first = "the first call of its shape" if shape is None else "the first call in its thread"
        self.counts.eager[change or first] += 1
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
        passes = [fuse_step] if call.caches else []
        replay, output = self._capture(forward, lambda run: run(*args, **kwargs), lambda out: out, call.device, passes)
        shape.inputs, shape.output = inputs, _output_of(output, call.caches)
        with self._gpu.in_order(call.device):
            result = shape.launch(replay)
        shape.replay = replay
        self.counts.captured += 1
        self._drop(*self._held()[: -self._limit])
        return result

    def _held(self) -> list[Any]:
        """Return the keys of graphs, the last used one last."""
        return [key for key, shape in self._shapes.items() if shape.replay is not None]

    def _drop(self, *keys: Any) -> None:
        """Drop the graphs of some keys, and count the others."""
        if any(key in self._held() for key in keys):
            self._gpu.wait()
        for key in keys:
            self._shapes.pop(key, None)
        self.counts.held = len(self._held())
        inputs = [static.nbytes for shape in self._shapes.values() for static in shape.inputs]
        self.counts.memory = sum(inputs) + (self._pool_bytes if self.counts.held else 0)

    def _forget(self) -> None:
        self._drop(*self._shapes)
        self._snapshot = None


def _output_of(output: Any, caches: dict[str, Any]) -> Any:
    """Return the structure of a captured output. Raise `Refused` if it holds something that a replay cannot make."""
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
