"""Check a candidate's results on inputs that it has not seen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernel_builder.api import POISON, deviation
from kernel_format.errors import ConfigError
from kernel_judge.judge.comparison import Difference, ErrorRule, difference
from kernel_judge.judge.evaluation import synchronize
from kernel_judge.judge.outside_inputs import expected_results, outside_inputs
from kernel_judge.judge.reference import Arguments, Reference, Results, Tensors
from kernel_judge.judge.worker_process import LATE_SECONDS, WorkerFailure, WorkerProcess
from kernel_sandbox.answers import has_form
from kernel_tasks import Task

_FIRST_CALL = 10  # times the limit of a call: the first ones may compile
_REPEATED = 10  # every tenth input is given twice
_OUTSIDE = "wrong-outside-inputs"
# Dtypes that results may have where the task's rule decides.
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip
_LOW_PRECISION = 2**-8  # the rounding error of bfloat16
_LEAST_SAMPLES = 3  # of inputs of one shape, to call a result constant
Call = Callable[[Arguments], Tensors]


class RejectedError(Exception):
    """A candidate is wrong. `kind` is the name of the failure, `case` the first failing case."""

    def __init__(self, kind: str, text: str, case: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.kind, self.case = kind, case


class ResultChecks:
    """The checks of one candidate, whose worker has models with the numbers of the references.

    `rules` has the errors of each reference's inputs, if the checks compare errors, `before` eager's results for the
    last inputs at which the candidate was right. `has_outside`: others are checked, too. `seconds` limits a call.
    """

    def __init__(
        self,
        worker: WorkerProcess,
        references: Sequence[Reference],
        tolerance: float,
        seconds: float,
        *,
        compares_errors: bool = True,
    ) -> None:
        self._worker, self._references = worker, references
        self._tolerance, self._seconds, self._compares_errors = tolerance, seconds, compares_errors
        self.rules = [ErrorRule(tolerance, reference.has_exact) for reference in references]
        self.suspicious: list[str] = []
        self.has_outside = False
        self._rounding = 0.0  # of the candidate, where the task's rule accepts lower precisions
        self.before: dict[int, Tensors] = {}
        self._varieties: dict[int, _Variety] = {}

    def check(self, seeds: Sequence[int]) -> None:
        """Check the candidate on one input a seed, at the references' sizes in turn."""
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
        self._check_constants(cases)
        for number, rule in enumerate(self.rules):
            if reason := rule.fault():
                raise RejectedError(
                    "inaccurate", f"it is less accurate than eager PyTorch: {reason}", cases.get(number)
                )

    def check_outside(self, task: Task, seed: int, build_seconds: float) -> None:
        """Check inputs and parameters that are right to use and that the task itself never has.

        Inputs are checked in each dtype at its quickest shape. `build_seconds` limits constructing one more model.
        """
        self.has_outside = True
        slowest_first = sorted(enumerate(self._references), key=lambda numbered: -numbered[1].seconds)
        for number in {reference.dtype: number for number, reference in slowest_first}.values():
            for name, given in outside_inputs(self._references[number], seed):
                self.one_outside(number, self._references[number], given, name)
        first = self._references[0]
        try:
            other = Reference(
                task, first.sizes, first.dtype, first.device, seed, lengths=first.lengths, random_parameters=True
            )
        except ConfigError:  # the values that it has are the only ones that it accepts
            return
        if other.randomized:
            number = len(self._references)
            loaded = self._worker.ask("model", number, *other.model_arguments(), seconds=build_seconds)
            self._check_parameters(number, other, seed, loaded)

    def _check_parameters(self, number: int, reference: Reference, seed: int, loaded: Any) -> None:
        """Check the candidate with random values of the parameters whose values are equal."""
        replaced = reference.randomized or []
        known = has_form(loaded, [bool, (int, float), [[(int, float)]]])
        agrees, elements, own = loaded if known else (False, 0.0, [])
        lacks = not agrees and any(own.count(entry) < replaced.count(entry) for entry in replaced)
        if lacks and elements >= sum(length for length, _ in replaced):  # it may have them in another form
            self.suspicious.append(
                "Parameters of equal values were not replaced by random values, since its own have other names and "
                "shapes: it may ignore them."
            )
            return
        name = "random parameters in place of equal ones"
        self.one_outside(number, reference, reference.arguments(seed), name)

    def one_outside(
        self, number: int, reference: Reference, given: Arguments, name: str, call: Call | None = None
    ) -> None:
        """Check the results of a call with other inputs than the task's, if the reference accepts them."""
        known = expected_results(reference, given, min(self._rounding, _LOW_PRECISION))
        if known is None or any(map(_overflows, known[0], (dtype for _, dtype in reference.accepted))):
            return
        case = {**describe(reference, given), "inputs": name}
        wrong_for = f"right for the task's own inputs, wrong for {name}"
        try:
            results = call(given) if call else self._called(number, given, case, reference)
        except (WorkerFailure, RejectedError) as failure:
            if failure.kind == "unfinished-work":  # of a timed run, whatever its inputs are
                raise
            raise RejectedError(_OUTSIDE, f"{wrong_for}: {failure.kind}: {failure}", case) from failure
        eager, expected, allowed = known
        wrong = difference(results, eager, expected, self._tolerance, (reference, given), allowed)
        if wrong and not reference.accepts(given, results, eager):
            if call:
                self._worker.check_finished()
            raise RejectedError(_OUTSIDE, f"{wrong_for}: {wrong.text}", case | wrong.facts)

    def _check_constants(self, cases: dict[int, dict[str, Any]]) -> None:
        constant = False
        for number, variety in self._varieties.items():
            if variety.count < _LEAST_SAMPLES:
                continue
            for place, (ours, expected) in enumerate(zip(variety.ours, variety.expected, strict=True), 1):
                if expected and not ours:
                    which = "its result" if len(variety.ours) == 1 else f"its result {place} of {len(variety.ours)}"
                    text = f"{which} is the same for all inputs, though the reference's is not; compute it from them"
                    raise RejectedError("constant-result", text, cases.get(number))
            constant |= not any(variety.expected)
        if constant:
            self.suspicious.append(
                "The reference's result is the same for all inputs that were checked: a candidate may ignore them."
            )

    def _one(self, number: int, given: Arguments, case: dict[str, Any], *, repeat: bool) -> None:
        # The candidate comes first: there is no result of the reference for these inputs that it could find.
        first = self._called(number, given, case)
        again = self._called(number, given, case) if repeat else first
        reference = self._references[number]
        eager, exact = reference.eager(given), reference.exact(given)
        for results in (again, first) if repeat else (first,):
            if wrong := self._difference(number, given, results, eager, exact):
                if results is again and self._is_late(number, given, eager, exact):
                    text = "its result is written after the call; wait for the stream or thread that writes it"
                    raise RejectedError("unfinished-work", text, case)
                raise self._named(wrong, number, results, case)
        if number not in self.before and exact is not None and not self._compares_errors:
            errors = (deviation(*pair).relative for pair in zip(first, exact, strict=True))
            self._rounding = max(self._rounding, *errors)
        if repeat and not all(map(torch.equal, first, again)):
            sentence = "Its results for equal inputs differ, within the tolerance."
            self.suspicious += [sentence] if sentence not in self.suspicious else []
        if self._compares_errors and not (exact is None and reference.has_rule):
            self.rules[number].add(first, eager, exact or eager)
        self._varieties.setdefault(number, _Variety(first, exact or eager)).add(first, exact or eager)
        self.before[number] = eager

    def _difference(
        self, number: int, given: Arguments, results: Tensors, eager: Tensors, exact: Tensors | None
    ) -> Difference | None:
        reference = self._references[number]
        if not reference.has_rule:
            return difference(results, eager, exact, self._tolerance, (reference, given))
        text = reference.fault(given, results, eager)
        return Difference("wrong-result", text, {}) if text else None

    def _called(
        self, number: int, given: Arguments, case: dict[str, Any], reference: Reference | None = None
    ) -> Tensors:
        """Return copies of the results of one call, in memory that was poisoned before."""
        worker, reference = self._worker, reference or self._references[number]
        call, slots = reserve(worker, [given], reference.accepted)
        fill(worker, call, [given])
        before = worker.inputs.raw(worker.inputs.end).clone()
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in reference.accepted]
        synchronize(reference.device)
        seconds = self._seconds * (1 if number in self.before else _FIRST_CALL)
        try:
            worker.ask("call", number, call[0], slots[0], given.seed, sizes, seconds=seconds)
        except WorkerFailure as failure:
            if failure.kind != "wrong-dtype" or not self._accepts_dtypes(reference):
                raise
            return self._called(number, given, case, reference)
        worker.stop()
        copies = [worker.outputs.tensor(slot).clone() for slot in slots[0]]
        changed = not torch.equal(before, worker.inputs.raw(worker.inputs.end))
        worker.go_on()
        if changed and not reference.may_change:
            raise RejectedError("input-changed", "it changes its inputs; write results to memory of their own", case)
        return copies

    def _accepts_dtypes(self, reference: Reference) -> bool:
        """Let results have the candidate's dtypes from now on, if the task's rule decides on them. It is done once."""
        if not reference.decides_dtypes or reference.accepted is not reference.results:
            return False
        answer = self._worker.ask("dtypes", seconds=self._seconds)
        own = [_DTYPES.get(name) for name in answer] if has_form(answer, [str]) else []
        if len(own) != len(reference.results) or None in own:
            return False
        reference.accepted = [(shape, dtype) for (shape, _), dtype in zip(reference.results, own, strict=True) if dtype]
        names, expected = (
            ", ".join(str(dtype).removeprefix("torch.") for _, dtype in results)
            for results in (reference.accepted, reference.results)
        )
        sentence = f"Its results are {names}, the reference's {expected}: the task's rule decides on dtypes."
        self.suspicious += [sentence] if sentence not in self.suspicious else []
        return True

    def _named(self, wrong: Difference, number: int, results: Tensors, case: dict[str, Any]) -> RejectedError:
        """Return the rejection, by the name of the failure."""
        case = case | wrong.facts
        stale = self.before.get(number)
        if stale and all(torch.allclose(a.to(b.dtype), b, 1e-3, 1e-5) for a, b in zip(results, stale, strict=True)):
            return RejectedError("stale-result", "it returns the result of an earlier call with other values", case)
        return RejectedError(wrong.kind, f"{wrong.text}, for inputs of the shapes {case['shapes']}", case)

    def _is_late(self, number: int, given: Arguments, eager: Tensors, exact: Tensors | None) -> bool:
        """Return whether the results of the last call, which were wrong, have become right."""
        self._worker.go_on()
        time.sleep(LATE_SECONDS)
        try:
            self._worker.ask("hand_over", seconds=self._seconds)
        except WorkerFailure:
            return False
        outputs = self._worker.outputs
        outputs.clear()
        slots = [outputs.reserve(shape, dtype) for shape, dtype in self._references[number].accepted]
        later = [outputs.tensor(slot).clone() for slot in slots]
        return self._difference(number, given, later, eager, exact) is None


class _Variety:
    """Which results of a candidate, and which of the reference, have differed between inputs of one shape."""

    def __init__(self, results: Tensors, expected: Tensors) -> None:
        self._results, self._expected = results, expected
        self.ours, self.expected = [False] * len(results), [False] * len(results)
        self.count = 0

    def add(self, results: Tensors, expected: Tensors) -> None:
        """Compare results with the first ones."""
        self.count += 1
        for place, (first, result) in enumerate(zip(self._results, results, strict=True)):
            self.ours[place] = self.ours[place] or not torch.equal(first, result)
            rounding = 4 * torch.finfo(result.dtype).eps if result.is_floating_point() else 0.0
            before, now = self._expected[place], expected[place]
            self.expected[place] = self.expected[place] or not torch.allclose(
                before, now, rounding, rounding, equal_nan=True
            )


def _overflows(expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a dtype of the candidate's choice is too narrow for a result."""
    return bool((expected.isfinite() & ~expected.to(dtype).isfinite()).any())


def reserve(
    worker: WorkerProcess, calls: Sequence[Arguments], results: Results, *, append: bool = False
) -> tuple[list[Any], list[list[Any]]]:
    """Reserve memory of a worker's arenas for the inputs of calls, which `fill` copies, and their poisoned results.

    Returns:
        The arguments of the worker's commands for each call: its inputs, and the slots of its results.
    """
    inputs, outputs = worker.inputs, worker.outputs
    if not append:
        inputs.clear()
        outputs.clear()
    placed = []
    for given in calls:
        tensors = [*given.tensors, *(given.grads or ())]
        slots = [inputs.reserve(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors]
        own = len(given.tensors)
        placed.append((given.skeleton, slots[:own], None if given.grads is None else slots[own:]))
    reserved = [[outputs.reserve(shape, dtype) for shape, dtype in results] for _ in calls]
    outputs.raw(outputs.end).fill_(POISON)
    return placed, reserved


def fill(worker: WorkerProcess, placed: Sequence[Any], calls: Sequence[Arguments]) -> None:
    """Copy the inputs of calls to the slots that `reserve` returned."""
    for (_, slots, grads), given in zip(placed, calls, strict=True):
        for slot, tensor in zip([*slots, *(grads or ())], [*given.tensors, *(given.grads or ())], strict=True):
            worker.inputs.write(slot, tensor.detach())


def describe(reference: Reference, given: Arguments) -> dict[str, Any]:
    """Return a case as a verdict names it."""
    return {
        "shapes": [list(tensor.shape) for tensor in given.tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in given.tensors],
        "seed": given.seed,
        "sizes": {name: list(size) if isinstance(size, tuple) else size for name, size in reference.sizes.items()},
    }
