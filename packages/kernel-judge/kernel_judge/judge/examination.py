"""Check a candidate's results on inputs that it has not seen, before anything is timed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from kernel_builder.measure.poison import POISON
from kernel_judge.judge.comparison import Difference, ErrorRule, difference
from kernel_judge.judge.reference import Arguments, Reference, Tensors
from kernel_judge.judge.worker_process import WorkerFailure, WorkerProcess

_LATE_SECONDS = 0.3  # for a thread that writes a result late, to name the failure
_REPEATED = 10  # every tenth input is given twice


class RejectedError(Exception):
    """A candidate is wrong.

    Attributes:
        kind: The name of the failure.
        case: The first failing case.
    """

    def __init__(self, kind: str, text: str, case: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.kind, self.case = kind, case


class Examination:
    """The checks of one candidate.

    Args:
        worker: Has the candidate's models, numbered as the references.
        references: What to compare with.
        tolerance: Of each element.
        seconds: Limit of a call.

    Attributes:
        rules: The errors of each reference's inputs.
        suspicious: What was noticed that is not wrong.
    """

    def __init__(
        self, worker: WorkerProcess, references: Sequence[Reference], tolerance: float, seconds: float
    ) -> None:
        self._worker, self._references = worker, references
        self._tolerance, self._seconds = tolerance, seconds
        self.rules = [ErrorRule(tolerance) for _ in references]
        self.suspicious: list[str] = []
        self._before: dict[int, Tensors] = {}

    def check(self, seeds: Sequence[int]) -> None:
        """Check the candidate on one input a seed, at the references' sizes in turn.

        Raises:
            RejectedError: At the first wrong result.
            WorkerFailure: If a call fails.
        """
        cases: dict[int, dict[str, Any]] = {}
        for count, seed in enumerate(seeds):
            number = count % len(self._references)
            given = self._references[number].arguments(seed)
            case = describe(self._references[number], given)
            cases.setdefault(number, case)
            try:
                self._one(number, given, case, repeat=count % _REPEATED == 0)
            except WorkerFailure as failure:
                raise RejectedError(
                    failure.kind, f"{failure}, for inputs of the shapes {case['shapes']}", case
                ) from failure
        for number, rule in enumerate(self.rules):
            if rule.worst and (reason := rule.fault()):
                raise RejectedError(
                    "inaccurate", f"it is less accurate than eager PyTorch: {reason}", cases.get(number)
                )

    def _one(self, number: int, given: Arguments, case: dict[str, Any], *, repeat: bool) -> None:
        # The candidate comes first: there is no result of the reference for these inputs that it could find.
        first = self._called(number, given, case)
        again = self._called(number, given, case) if repeat else first
        reference = self._references[number]
        eager, exact = reference.eager(given), reference.exact(given)
        for results in (again, first) if repeat else (first,):
            if wrong := difference(results, eager, exact, self._tolerance):
                if results is again and self._is_late(number, eager, exact):
                    raise RejectedError(
                        "unfinished-work",
                        "its result is written after the call has returned; wait for the stream or thread that writes "
                        "it",
                        case,
                    )
                raise self._named(wrong, number, results, case)
        if number not in self._before:
            self._check_layout(number, case)
        if repeat and not all(map(torch.equal, first, again)):
            sentence = "Its results for equal inputs differ, within the tolerance."
            self.suspicious += [sentence] if sentence not in self.suspicious else []
        if exact is not None:
            self.rules[number].add(first, eager, exact)
        self._before[number] = eager

    def _called(self, number: int, given: Arguments, case: dict[str, Any]) -> Tensors:
        """Return copies of the results of one call, in memory that was poisoned before."""
        worker, reference = self._worker, self._references[number]
        call, slots = place(worker, reference, [given])
        before = worker.inputs.raw(worker.inputs.end).clone()
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in reference.results]
        synchronize(reference.device)
        worker.ask("call", number, call[0], slots[0], given.seed, sizes, seconds=self._seconds)
        worker.stop()
        copies = [worker.outputs.tensor(slot).clone() for slot in slots[0]]
        changed = not reference.mutates and not torch.equal(before, worker.inputs.raw(worker.inputs.end))
        worker.go_on()
        if changed:
            raise RejectedError("input-changed", "it changes its inputs; write results to memory of their own", case)
        return copies

    def _check_layout(self, number: int, case: dict[str, Any]) -> None:
        answer = self._worker.ask("layout", seconds=self._seconds)
        results = self._references[number].results
        try:
            strides = [[int(step) for step in stride] for call in answer for stride in call]
        except (TypeError, ValueError):
            strides = []
        if [len(stride) for stride in strides] != [len(shape) for shape, _ in results]:
            raise RejectedError("forged-answer", "it changes what the judge's worker answers", case)
        for (shape, _), stride in zip(results, strides, strict=True):
            if _overlaps(shape, stride):
                text = f"a result of shape {list(shape)} has strides {stride}, so that elements share memory"
                raise RejectedError("wrong-strides", f"{text}; allocate all of it", case)

    def _named(self, wrong: Difference, number: int, results: Tensors, case: dict[str, Any]) -> RejectedError:
        """Return the rejection, by the name of what happened."""
        case = case | wrong.facts
        stale = self._before.get(number)
        if stale and all(torch.allclose(a, b, 1e-3, 1e-5) for a, b in zip(results, stale, strict=True)):
            return RejectedError("stale-result", "it returns the result of an earlier call with other values", case)
        return RejectedError(wrong.kind, f"{wrong.text}, for inputs of the shapes {case['shapes']}", case)

    def _is_late(self, number: int, eager: Tensors, exact: Tensors | None) -> bool:
        """Return whether the results of the last call, which were wrong, have become right."""
        self._worker.go_on()
        time.sleep(_LATE_SECONDS)
        try:
            self._worker.ask("hand_over", seconds=self._seconds)
        except WorkerFailure:
            return False
        later = [self._worker.outputs.tensor(slot).clone() for slot in self._slots(number)]
        return difference(later, eager, exact, self._tolerance) is None

    def _slots(self, number: int) -> list[Any]:
        self._worker.outputs.clear()
        return [self._worker.outputs.reserve(shape, dtype) for shape, dtype in self._references[number].results]


def place(
    worker: WorkerProcess, reference: Reference, calls: Sequence[Arguments], *, append: bool = False
) -> tuple[list[Any], list[list[Any]]]:
    """Copy the inputs of calls into a worker's arena, and make poisoned room for their results.

    Returns:
        What the worker's commands take for each call: its arguments, and the slots of its results.
    """
    placed, results = reserve(worker, reference, calls, append=append)
    fill(worker, placed, calls)
    return placed, results


def reserve(
    worker: WorkerProcess, reference: Reference, calls: Sequence[Arguments], *, append: bool = False
) -> tuple[list[Any], list[list[Any]]]:
    """Do as `place`, but leave the inputs to `fill`."""
    inputs, outputs = worker.inputs, worker.outputs
    if not append:
        inputs.clear()
        outputs.clear()
    placed = []
    for given in calls:
        slots = [inputs.reserve_like(tensor) for tensor in given.tensors]
        grads = None if given.grads is None else [inputs.reserve_like(grad) for grad in given.grads]
        placed.append((given.skeleton, slots, grads))
    results = [[outputs.reserve(shape, dtype) for shape, dtype in reference.results] for _ in calls]
    outputs.raw(outputs.end).fill_(POISON)
    return placed, results


def fill(worker: WorkerProcess, placed: Sequence[Any], calls: Sequence[Arguments]) -> None:
    """Copy the inputs of calls to where `reserve` has made room for them."""
    for (_, slots, grads), given in zip(placed, calls, strict=True):
        for slot, tensor in zip([*slots, *(grads or ())], [*given.tensors, *(given.grads or ())], strict=True):
            worker.inputs.tensor(slot).copy_(tensor.detach())


def describe(reference: Reference, given: Arguments) -> dict[str, Any]:
    """Return a case as a verdict names it."""
    return {
        "shapes": given.shapes(),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in given.tensors],
        "seed": given.seed,
        "sizes": {name: list(size) if isinstance(size, tuple) else size for name, size in reference.sizes.items()},
    }


def synchronize(device: str) -> None:
    """Wait for the GPU, so that another process sees what was written."""
    if device != "cpu":
        torch.cuda.synchronize()


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether two elements of a tensor have one address."""
    reach = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length > 1:
            if step < reach:
                return True
            reach = step * (length - 1) + reach
    return False
