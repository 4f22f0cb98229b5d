"""Time a candidate beside its peers, by the judge's clock.

A timed run calls a model on several sets of inputs, each new and used once, and copies all results into the judge's
memory. The judge's clock covers both, so work that is put off counts; the time of the copies alone is measured on
eager's results and subtracted from all. Every result of a timed run is compared with eager's.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_builder.measure.case import copies
from kernel_builder.measure.estimates import Estimate, estimate
from kernel_builder.measure.results import geometric_mean
from kernel_builder.measure.timing import Clock, clock, sets_needed
from kernel_builder.search.comparison import ErrorRule
from kernel_builder.search.examination import Examination, RejectedError, describe, fill, place, reserve, synchronize
from kernel_builder.search.other_work import one_thread, stalled_seconds
from kernel_builder.search.peers import EAGER, Peers
from kernel_builder.search.reference import Arguments, Reference
from kernel_builder.search.verdict import Speedup
from kernel_builder.search.worker import WorkerFailure, WorkerProcess

_CANDIDATE = "candidate"
_RUN_SECONDS = 20e-3
_SHORT, _LONGEST = 0.5, 5.0  # times that: too short; the longest of eager, for a faster candidate's run to be as long
_CPU_RUN_BYTES = 32 << 20
_MOST_CALLS = 400
# After so many seconds at a shape, and this many rounds, no further round starts.
_SHAPE_SECONDS = {"cpu": 1.0, "cuda": 60.0}
_LEAST_ROUNDS = 3
_LEAST_CALLS = 3
_FEW_RUNS, _MANY_RUNS = 3, 12  # on equal inputs
# Calls of such a run, whose first computes even if the candidate keeps its result, and its least time, in starts.
_LEAST_EQUAL, _LONG_RUN = 8, 4.0
_EQUAL_SECONDS = 2.0  # after which, and after some runs, no further one starts
# A run of less than this share of the time, on equal inputs, has skipped work; one of more than the other has not.
_SKIPPED, _CLEAR = 0.5, 0.75
# How far the worker's clock may be from the judge's, and how much of a run its start and end may take.
_DISAGREEMENT, _START = 0.25, {"cpu": 4e-3, "cuda": 2e-3}
_BUSY = 0.3  # of the time, in which threads wait for a core
_SPREAD = 3.0  # of the speedups at different shapes
_BEYOND_COPIES = 2.0  # times copy speed; kernels that are bound by memory have 1, and caches help some
_FLUSHED = 2  # times the cache


@dataclass
class SpeedReport:
    """The part of a verdict that is about speed."""

    speed: dict[str, Speedup] = field(default_factory=dict)
    share_of_copy_speed: float | None = None
    share_of_peak: float | None = None
    suspicious: list[str] = field(default_factory=list)
    cases: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass
class _Shape:
    """The samples of one shape: seconds of a call, by participant."""

    reference: Reference
    given: Arguments
    calls: int
    seconds: dict[str, list[float]]


def measure_speed(
    worker: WorkerProcess,
    peers: Peers,
    references: Sequence[Reference],
    examination: Examination,
    rounds: int,
    seconds: float,
    choice: random.Random,
) -> SpeedReport:
    """Time a candidate and its peers at the sizes of the references.

    Args:
        worker: Has the candidate's models.
        peers: Have the same models.
        references: What to time.
        examination: Has checked the candidate; its errors bound what a timed result may differ by.
        rounds: Samples of each time.
        seconds: Limit of a run.
        choice: Of seeds.

    Raises:
        RejectedError: If a result of a timed run is wrong, work is skipped, or the clocks disagree.
        WorkerFailure: If a call fails.
    """
    device = references[0].device
    timer = clock(device)
    shapes = []
    started, stalled = time.monotonic(), stalled_seconds()
    for number, reference in enumerate(references):
        race = _Race(worker, peers, number, reference, examination.rules[number], timer, seconds, choice)
        shapes.append(race.shape(rounds))
        if number == 0:
            race.check_repeats()
            race.check_clock()
    share = (stalled_seconds() - stalled) / (time.monotonic() - started)
    report = _report(shapes, timer)
    if share > _BUSY:
        report.suspicious.append(
            f"Threads waited for a core in {share:.0%} of the time: other work kept the CPU busy, and times are "
            "uncertain. Judge it again on a quiet machine."
        )
    return report


class _Race:
    """The timed runs at one shape."""

    def __init__(
        self,
        worker: WorkerProcess,
        peers: Peers,
        number: int,
        reference: Reference,
        rule: ErrorRule,
        timer: Clock,
        seconds: float,
        choice: random.Random,
    ) -> None:
        self._worker, self._peers, self._number, self._reference = worker, peers, number, reference
        self._rule, self._seconds, self._choice = rule, seconds, choice
        self._device = reference.device
        self._given = reference.arguments(choice.getrandbits(48))
        self._calls = _LEAST_CALLS
        self._flushed = torch.zeros(_FLUSHED * timer.cache // 4, device=self._device)
        self._reported: list[tuple[float, float]] = []
        self._least_overhead = 0.0

    def shape(self, rounds: int) -> _Shape:
        """Return the samples of all participants, after one round that does not count."""
        runs: dict[str, list[float]] = {name: [] for name in (_CANDIDATE, *self._peers.workers)}
        copying = []
        end = time.monotonic() + _SHAPE_SECONDS[self._device]
        self._lengthen()
        for turn in range(rounds + 1):
            if turn > _LEAST_ROUNDS and time.monotonic() > end:
                break
            calls = self._new_calls(self._calls)
            names = list(runs)
            first = turn % len(names)
            taken = {}
            for name in names[first:] + names[:first]:
                try:
                    taken[name] = self._run(name, calls)
                except WorkerFailure as failure:
                    if name == _CANDIDATE:
                        raise
                    self._peers.leave_out(name, failure)
                    del runs[name]
            self._compare(calls)
            if turn == 0 and taken.get(EAGER, math.inf) < _SHORT * _RUN_SECONDS:
                self._lengthen()  # the machine was busy when the number of calls was chosen
            if turn:
                copying.append(self._hand_over())
                for name, samples in runs.items():
                    samples.append(taken[name])
        self._least_overhead = overhead = min(copying)
        seconds = {name: [_net(one, overhead) / self._calls for one in taken] for name, taken in runs.items()}
        return _Shape(self._reference, self._given, self._calls, seconds)

    def _lengthen(self) -> None:
        """Choose how many calls a run needs to be long enough for the clock, within the memory for their inputs."""
        most = max(_LEAST_CALLS, min(self._room(), _MOST_CALLS))
        while True:
            calls = self._new_calls(self._calls)
            eagers, ours = (min(self._run(name, calls) for _ in range(2)) for name in (EAGER, _CANDIDATE))
            share = max(min(eagers, ours), eagers / _LONGEST) / _RUN_SECONDS
            if share >= 1 or self._calls >= most:
                self._reported.clear()  # of runs too short to compare clocks
                return
            self._calls = min(most, math.ceil(self._calls * max(1.2, min(1 / share, 8.0))))

    def _room(self) -> int:
        """Return for how many calls there is memory."""
        if self._device == "cpu":
            return _CPU_RUN_BYTES // max(self._reference.moved(self._given), 1)
        worker = self._worker
        place(worker, self._reference, [self._given])
        return worker.inputs.size // max(worker.inputs.end, worker.outputs.end, 1)

    def check_repeats(self) -> None:
        """Compare runs on equal inputs with runs on different ones.

        Raises:
            RejectedError: If the candidate is much faster on equal ones, and eager is not.
        """
        if self._share_of_repeats(_CANDIDATE, _FEW_RUNS) >= _CLEAR:
            return
        # Equal inputs may be in the cache, and a busy machine disturbs short runs: many of them tell.
        share, eagers = (self._share_of_repeats(name, _MANY_RUNS) for name in (_CANDIDATE, EAGER))
        if share < _SKIPPED * min(eagers, 1.0):
            raise RejectedError(
                "cached-result",
                f"calls with equal values take {share:.0%} of the time of calls with different ones; a result must be "
                "computed in every call",
                describe(self._reference, self._given),
            )

    def _share_of_repeats(self, name: str, number: int) -> float:
        """Return the time of calls with equal values, divided by that of calls with different ones.

        Args:
            name: Whose calls.
            number: Of runs of each kind; fewer if they take long.
        """
        # The start of a run, on a busy machine, is not part of the work that could be skipped.
        start, most = _START[self._device], max(self._calls, min(self._room(), _MOST_CALLS))
        count = min(max(self._calls, _LEAST_EQUAL), most)
        overhead = self._least_overhead / self._calls
        while count < most:
            if (
                _net(min(self._run(name, self._new_calls(count)) for _ in range(2)), overhead * count)
                >= _LONG_RUN * start
            ):
                break
            count = min(2 * count, most)
        different: list[Arguments] = []
        taken: dict[bool, list[float]] = {True: [], False: []}
        end = time.monotonic() + _EQUAL_SECONDS
        for turn in range(number):
            if turn > _FEW_RUNS and time.monotonic() > end:
                break
            if not different or name == _CANDIDATE:  # which may know values that it has seen
                different = self._new_calls(count)
            taken[False].append(self._run(name, different))
            taken[True].append(self._run(name, self._new_calls(1) * count))
        # The least of several: what else runs on the machine only adds time.
        same, other = (_net(min(taken[equal]), overhead * count) for equal in (True, False))
        return (same + start) / (other + start)

    def _new_calls(self, count: int) -> list[Arguments]:
        return [self._reference.arguments(self._choice.getrandbits(48)) for _ in range(count)]

    def _run(self, name: str, calls: Sequence[Arguments]) -> float:
        """Return the seconds of one run by this process's clock."""
        worker = self._worker if name == _CANDIDATE else self._peers.workers[name]
        placed, slots = reserve(worker, self._reference, calls)
        worker.ask("prepare", placed, slots, seconds=self._seconds)
        # From here on, the worker's processes run only while the clock does, and none slows down another worker.
        worker.stop()
        fill(worker, placed, calls)
        before = worker.inputs.raw(worker.inputs.end).clone() if name == _CANDIDATE else None
        with one_thread():
            self._flushed.sum()
        synchronize(self._device)
        taken, reported = worker.timed("run", self._number, calls[0].seed, seconds=self._seconds)
        worker.stop()
        if before is not None:
            # In an order that the candidate cannot foresee, for it may still write to a GPU's memory.
            order = self._choice.sample(range(len(slots)), len(slots))
            found = {one: [worker.outputs.tensor(slot).clone() for slot in slots[one]] for one in order}
            self._found = [found[one] for one in range(len(slots))]
            if not self._reference.mutates and not torch.equal(before, worker.inputs.raw(worker.inputs.end)):
                raise RejectedError(
                    "input-changed", "it changes its inputs when it is timed", describe(self._reference, calls[0])
                )
            self._reported.append((taken, reported_seconds(reported)))
        elif name == EAGER:
            self._expected = [[worker.outputs.tensor(slot) for slot in one] for one in slots]
        return taken

    def _compare(self, calls: Sequence[Arguments]) -> None:
        """Compare what the candidate has returned when it was timed with what eager has."""
        for given, found, expected in zip(calls, self._found, self._expected, strict=True):
            if not self._rule.agree(found, expected):
                raise RejectedError(
                    "wrong-when-timed",
                    "a result of its timed calls is wrong, though the same shapes were right before: results must not "
                    "depend on earlier calls",
                    describe(self._reference, given),
                )

    def _hand_over(self) -> float:
        """Return the seconds that copying the results alone takes."""
        taken, _ = self._peers.workers[EAGER].timed("hand_over", seconds=self._seconds)
        return taken

    def check_clock(self) -> None:
        """Compare this process's clock with what the candidate's has reported.

        Raises:
            RejectedError: If they disagree in every run.
        """
        # This process may be late to see the end of a run, but not of every run.
        shares = [(abs(taken - reported) - _START[self._device]) / taken for taken, reported in self._reported]
        if min(shares) > _DISAGREEMENT:
            taken, reported = self._reported[-1]
            raise RejectedError(
                "clock-disagrees",
                f"a run took {taken * 1e3:.3g} ms by the judge's clock and {reported * 1e3:.3g} ms by the clock in the "
                "candidate's process",
                describe(self._reference, self._given),
            )


def reported_seconds(answer: object) -> float:
    """Return the time that a worker reports; infinity, which no clock agrees with, if it is no time."""
    if isinstance(answer, (int, float)) and math.isfinite(answer):
        return float(answer)
    return math.inf


def _net(taken: float, overhead: float) -> float:
    """Return a run's time without that of copying results: at least a fifth, for it has written what was copied."""
    return max(taken - overhead, 0.2 * taken)


def _report(shapes: Sequence[_Shape], timer: Clock) -> SpeedReport:
    report = SpeedReport()
    ratios: dict[str, list[Estimate]] = {}
    shares, peaks = [], []
    for shape in shapes:
        ours = shape.seconds[_CANDIDATE]
        for name, taken in shape.seconds.items():
            if name != _CANDIDATE:
                found = estimate([peer / one for peer, one in zip(taken, ours, strict=True)])
                ratios.setdefault(name, []).append(found)
        milliseconds = {name: _short(statistics.median(taken) * 1e3) for name, taken in shape.seconds.items()}
        moved = shape.reference.moved(shape.given)
        shares.append(_copy_seconds(moved, shape.reference.device, timer) / statistics.median(ours))
        if peak := _share_of_peak(shape, statistics.median(ours)):
            peaks.append(peak)
        case = describe(shape.reference, shape.given)
        report.cases.append({**case, "bytes": moved, "calls": shape.calls, "milliseconds": milliseconds})
    for name, each in ratios.items():
        columns = zip(*each, strict=True)
        report.speed[name] = Speedup(*(_short(geometric_mean(column)) for column in columns))
    report.share_of_copy_speed = _short(geometric_mean(shares))
    report.share_of_peak = _short(geometric_mean(peaks)) if len(peaks) == len(shapes) else None
    if report.share_of_copy_speed > _BEYOND_COPIES:
        report.suspicious.append(
            f"It is {report.share_of_copy_speed:.3g} times as fast as a copy of its inputs, parameters and results: it "
            "does not need all of them, or its time is not that of its work."
        )
    medians = [one.median for one in ratios[EAGER]]
    if max(medians) > _SPREAD * min(medians):
        named = ", ".join(f"{one:.3g}" for one in medians)
        report.suspicious.append(
            f"Its speed depends on the shape: it is {named} times as fast as eager at the shapes timed."
        )
    return report


def _copy_seconds(moved: int, device: str, timer: Clock) -> float:
    with timer.context():
        run, _ = copies(max(moved, 4096), min(sets_needed(timer.cache, moved), 64), device, timer)
        return min(run() for _ in range(3))


def _share_of_peak(shape: _Shape, seconds: float) -> float | None:
    """Return the share of the speed of a large matrix product in the same dtype; None if there is little arithmetic."""
    from torch.utils.flop_counter import FlopCounterMode

    if shape.given.grads is not None:
        return None
    with FlopCounterMode(display=False) as counter:
        shape.reference.eager(shape.given)
    operations = counter.get_total_flops()
    if operations < 30 * shape.reference.moved(shape.given):
        return None
    size = 1024 if shape.reference.device == "cpu" else 8192
    dtype = getattr(torch, shape.reference.dtype or "float32")
    one = torch.randn(size, size, device=shape.reference.device).to(dtype)
    timer = clock(shape.reference.device)
    with timer.context():
        run, _ = timer.series([lambda: one @ one])
        peak = 2 * size**3 / min(run() for _ in range(3))
    return _short(operations / seconds / peak)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
