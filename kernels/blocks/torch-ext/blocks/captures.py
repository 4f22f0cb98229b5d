"""The common part of captured forwards and captured decoding steps: a model's state, its obstacles, and its kernels."""

import threading
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import nn
from torch.fx import GraphModule

from .calls import Refused, refuse_if
from .fusions import fuse
from .gpu import Gpu
from .recording import Recording
from .report import GraphCounts, Report
from .snapshots import Snapshot


class Captures:
    """The graphs of one model, all of them captured in the same state of the model.

    Attributes:
        counts: For the report.
    """

    def __init__(self, cls: type, report: Report, gpu: Optional[Gpu] = None) -> None:
        self.counts = GraphCounts()
        self._cls = cls
        self._report = report
        self._gpu = gpu or Gpu()
        self._lock = threading.RLock()
        self._thread = threading.local()
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
        """Return the device of a model.

        Raises:
            Refused: If nothing can be captured or replayed there now.
        """
        weight = next(model.parameters(), None)
        if weight is None or weight.device.type != self._gpu.type:
            if self._snapshot is not None:
                self.remove()
            self.counts.note = "the model is not on a CUDA device"
            raise Refused(self.counts.note)
        obstacle = self._gpu.find_obstacle(weight.device)
        if obstacle is not None:
            raise Refused(obstacle)
        return weight.device

    def _check_state(self, model: nn.Module, device: torch.device) -> Optional[str]:
        """Drop the graphs if the model has changed. Return the name of the change, or None.

        This cannot wait until the replay is launched. A graph of an outdated state may write to tensors that outlive
        it, as those of a cache, and may read indices out of range, after which CUDA is of no use to the process.
        """
        difference = None if self._snapshot is None else self._snapshot.find_difference(model)
        if difference is not None:
            self._forget()
        if self._snapshot is None:
            self._snapshot = Snapshot(model, device)
            self.counts.note = self._snapshot.obstacle
        if self._snapshot.obstacle is not None:
            raise Refused(self._snapshot.obstacle)
        return None if difference is None else f"the model has changed: {difference}"

    def _capture(
        self,
        forward: Callable[..., Any],
        call: Callable[[Callable[..., Any]], Any],
        finish: Callable[[Any], Any],
        device: torch.device,
        is_first: bool,
        *passes: Callable[[GraphModule], Any],
    ) -> tuple[Callable[[], None], Any]:
        """Capture `finish(call(forward))`, with kernels in place of some operations of the forward.

        Args:
            is_first: Whether no other graph uses the memory pool.
            passes: Further replacements in the graph of the forward.

        Returns:
            A function that repeats it, and the result.

        Raises:
            Refused: If it cannot be captured.
        """
        if is_first:
            self._pool, self._pool_bytes = self._gpu.new_pool(), 0
        recording = Recording(self._cls)
        call(lambda *args, **kwargs: recording.record(forward, args, kwargs))
        refuse_if((recording.writes_inputs, "it cannot be captured: it writes into its arguments"))
        self._report.add(recording.module.graph, fuse(recording.module), self._cls)
        for replace in passes:
            replace(recording.module)
        replay, result, used = self._gpu.capture(lambda: finish(call(recording.run)), self._pool, device)
        self._pool_bytes += used
        return replay, result
