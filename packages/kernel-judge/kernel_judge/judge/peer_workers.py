"""The candidate's peers: the reference in eager mode and compiled, each in a worker like the candidate's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from kernel_format.errors import MeasureError
from kernel_format.files import write_files
from kernel_judge.judge.evaluation import synchronize
from kernel_judge.judge.reference import Reference
from kernel_judge.judge.result_checks import fill, reserve
from kernel_judge.judge.verdict import Notify
from kernel_judge.judge.worker_process import WorkerFailure, WorkerProcess
from kernel_tasks import Task
from kernel_tasks.task import PROBLEM

EAGER, COMPILE = "eager", "compile"
COMPILED = (COMPILE, "max-autotune")
_START_SECONDS = 120.0


class PeerWorkers(ExitStack):
    """Workers that run the reference, with models by the references' numbers. They compile during the checks.

    Eager is started if any peer is wanted. `workers` has the timed peers, `missing` the reasons of the others.
    """

    def __init__(
        self,
        task: Task,
        references: Sequence[Reference],
        modes: Sequence[str],
        make: Callable[[], WorkerProcess],
        notify: Notify,
    ) -> None:
        super().__init__()
        self._notify = notify
        self._waiting: dict[str, int] = {}
        self.workers: dict[str, WorkerProcess] = {}
        self.missing: dict[str, str] = {}
        with ExitStack() as opened:
            for mode in dict.fromkeys([EAGER, *modes] if modes else []):
                worker = self.workers[mode] = opened.enter_context(make())
                write_files(worker.scratch, task.model_files(references[0].sizes))
                worker.start("open", worker.inputs.handle, worker.outputs.handle)
                worker.start("load", str(worker.scratch / PROBLEM), "Model")
                for number, reference in enumerate(references):
                    worker.start("model", number, *reference.model_arguments(mode))
                for number, reference in enumerate(references):
                    given = reference.arguments(reference.seed)
                    calls, slots = reserve(worker, [given], reference.results, append=number > 0)
                    fill(worker, calls, [given])
                    synchronize(reference.device)
                    worker.start("call", number, calls[0], slots[0], reference.seed, None)
                self._waiting[mode] = 3 + 2 * len(references)
            self.callback(opened.pop_all().close)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the peers on a CPU: threads of the candidate would wait for the cores on which they compile."""
        for worker in self.workers.values():
            worker.stop()
        try:
            yield
        finally:
            for worker in self.workers.values():
                with suppress(WorkerFailure):  # of a compiler that has run meanwhile
                    worker.go_on()

    def finish(self, seconds: float) -> None:
        """Wait until the peers are ready, and leave out those that have not compiled within a time, or cannot.

        Raises:
            MeasureError: If eager PyTorch fails.
        """
        end = time.monotonic() + seconds
        waited = f"it was not ready within {max(seconds, 0.0):.0f} s after the candidate was checked"
        for mode, count in self._waiting.items():
            try:
                for _ in range(count):
                    self.workers[mode].wait(_START_SECONDS if mode == EAGER else max(end - time.monotonic(), 0.01))
            except WorkerFailure as failure:
                late = failure.kind == "timeout" and mode != EAGER
                self.leave_out(mode, WorkerFailure("timeout", waited) if late else failure)
        self._waiting.clear()

    def leave_out(self, mode: str, failure: WorkerFailure) -> None:
        """Time a peer no longer, since it has failed.

        Raises:
            MeasureError: If it is eager PyTorch, with which results are compared.
        """
        if mode == EAGER:
            raise MeasureError(f"eager PyTorch fails in a process of its own: {failure}") from failure
        self._notify(f"left out beside the candidate: {mode}: {failure}")
        self.missing[mode] = str(failure)
        del self.workers[mode]
