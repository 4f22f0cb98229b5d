"""Time a candidate beside its peers, by the judge's clock.

A timed run calls a model on several sets of inputs, each new and used once, and copies all results into the judge's
memory. The judge's clock covers both, so work that is put off counts; the time of the copies alone is measured on
eager's results and subtracted from all. Every result of a timed run is compared with eager's. Between these runs, some
that do not count check inputs that the task's own do not have.
"""

from __future__ import annotations

import math
import pickle
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from kernel_builder.api import Clock, clock
from kernel_judge.judge.evaluation import synchronize
from kernel_judge.judge.outside_inputs import CHANGES, outside_inputs
from kernel_judge.judge.peer_workers import EAGER, PeerWorkers
from kernel_judge.judge.reference import Arguments, Reference, Tensors
from kernel_judge.judge.result_checks import RejectedError, ResultChecks, describe, fill, reserve
from kernel_judge.judge.speed_report import CANDIDATE, SpeedReport, TimedShape, report_speed
from kernel_judge.judge.verdict import Notify
from kernel_judge.judge.worker_process import WorkerFailure, WorkerProcess

_RUN_SECONDS = 20e-3
_SHORT, _LONGEST = 0.5, 5.0  # times that: too short; the longest of eager, for a faster candidate's run to be as long
_CPU_RUN_BYTES = 32 << 20
_MOST_CALLS = 400
# The least time for a shape, and the least number of rounds.
_SHAPE_SECONDS, _LEAST_ROUNDS = 1.0, 3
_LEAST_CALLS = 3
_DRAWING_SECONDS = 0.5  # the longest time to draw the inputs of a run
_SLOW_SECONDS = 0.2  # of a call, which is then a run of its own
_FEW_RUNS, _MANY_RUNS = 3, 12  # of a kind, to call a candidate right or wrong
# Calls of such a run, whose first computes even if the candidate keeps its result, and its least time, in starts. Other
# work on a GPU takes it for milliseconds at a time.
_LEAST_EQUAL, _LONG_RUN = 8, {"cpu": 4.0, "cuda": 20.0}
_EQUAL_SECONDS = 2.0  # after which, and after some runs, no further one starts
# A run of less than this share of the time, on equal inputs, has skipped work; one of more than the other has not.
_SKIPPED, _CLEAR = 0.5, 0.75
# How far the worker's clock may be from the judge's, and how much of a run its start and end may take.
_DISAGREEMENT, _START = 0.25, {"cpu": 4e-3, "cuda": 2e-3}
_FLUSHED = 2  # times the cache


class _RunTime(NamedTuple):
    """The duration of a run by this process's clock; and on a CPU the CPU time, elsewhere the same seconds."""

    seconds: float
    effort: float


def measure_speed(
    worker: WorkerProcess,
    peers: PeerWorkers,
    references: Sequence[Reference],
    checks: ResultChecks,
    rounds: int,
    seconds: float,
    end: float,
    choice: random.Random,
    notify: Notify,
) -> SpeedReport:
    """Time a candidate and its peers at the sizes of the references, whose numbers their models have.

    Args:
        checks: Has checked the candidate; its errors bound the differences of timed results.
        rounds: Samples of each time.
        seconds: Limit of a run.
        end: When to end, by `time.monotonic`. Each shape gets a second, and some rounds, even after it.

    Raises:
        RejectedError: If a result of a timed run is wrong, work is skipped, or the clocks disagree.
    """
    timer = clock(references[0].device)
    shapes = []
    for number, reference in enumerate(references):
        notify(f"timing shape {number + 1} of {len(references)}")
        left = (end - time.monotonic()) / (len(references) - number)
        runs = _TimedRuns(worker, peers, number, reference, checks, timer, seconds, choice)
        shapes.append(runs.shape(rounds, max(_SHAPE_SECONDS, left)))
        if number == 0:
            runs.check_repeats()
            runs.check_clock()
    report = report_speed(shapes, timer)
    # One that failed at a later shape has times of the first ones only.
    report.speed = {name: speed for name, speed in report.speed.items() if name not in peers.missing}
    report.missing_peers = peers.missing
    return report


@dataclass
class _TimedRuns:
    """The timed runs at one shape."""

    worker: WorkerProcess
    peers: PeerWorkers
    number: int
    reference: Reference
    checks: ResultChecks
    timer: Clock
    limit: float  # of a run, in seconds
    choice: random.Random

    def __post_init__(self) -> None:
        reference = self.reference
        self._device = reference.device
        self._given = reference.arguments(self.choice.getrandbits(48))
        self._is_slow = reference.seconds > _SLOW_SECONDS
        self._calls = 1 if self._is_slow else _LEAST_CALLS
        self._flushed = torch.zeros(_FLUSHED * self.timer.cache // 4, device=self._device)
        self._reported: list[tuple[float, float]] = []
        self._start = math.inf  # of eager's runs: the least time that its own clock does not see
        self._copying = _RunTime(0.0, 0.0)
        self._suspending = math.inf  # the least of eager's runs

    def shape(self, rounds: int, seconds: float) -> TimedShape:
        """Return the samples of all participants, after one round that does not count."""
        runs: dict[str, list[float]] = {name: [] for name in (CANDIDATE, *self.peers.workers)}
        copying = []
        end = time.monotonic() + seconds
        self._lengthen()
        due = {name: self.choice.randint(1, max(rounds, 1)) for name in CHANGES if self.checks.has_outside}
        for turn in range(rounds + 1):
            if turn > _LEAST_ROUNDS and time.monotonic() > end:
                break
            calls = self._new_calls(self._calls)
            first = turn % len(runs)
            taken = {}
            for name in [*runs][first:] + [*runs][:first]:
                try:
                    taken[name] = self._run(name, calls).seconds
                except WorkerFailure as failure:
                    if name == CANDIDATE:
                        raise
                    self.peers.leave_out(name, failure)
                    del runs[name]
            self._compare(calls)
            if turn == 0 and taken.get(EAGER, math.inf) < _SHORT * _RUN_SECONDS:
                self._lengthen()  # the machine was busy when the number of calls was chosen
            self._check_outside(calls, {name for name, at in due.items() if at == turn})
            if turn:
                copying.append(self._timed(self.peers.workers[EAGER], "hand_over")[0])
                for name, samples in runs.items():
                    samples.append(taken[name])
        self._check_outside(calls, {name for name, at in due.items() if at > len(copying)})
        self._copying = _RunTime(*map(min, zip(*copying, strict=True)))
        overhead = dict.fromkeys(runs, self._copying.seconds)
        overhead[CANDIDATE] *= self.reference.accepted_share()
        each = {name: [_net(run, overhead[name]) / self._calls for run in taken] for name, taken in runs.items()}
        return TimedShape(self.reference, self._given, self._calls, each)

    def _check_outside(self, calls: Sequence[Arguments], names: Collection[str]) -> None:
        """Check a run in which inputs outside of the task's replace those of one call, for each of these kinds."""
        for name, given in outside_inputs(self.reference, calls[0].seed) if names else ():
            if name in names:
                self.checks.one_outside(self.number, self.reference, given, name, partial(self._one_result, calls))

    def _lengthen(self) -> None:
        """Choose how many calls a run needs to be long enough for the clock, within the memory for their inputs."""
        most, times = self._most_calls(), 1 if self._is_slow else 2
        while True:
            calls = self._new_calls(self._calls)
            eagers, ours = (min(self._run(name, calls).seconds for _ in range(times)) for name in (EAGER, CANDIDATE))
            share = max(min(eagers, ours), eagers / _LONGEST) / _RUN_SECONDS
            if share >= 1 or self._calls >= most:
                self._reported.clear()  # of runs too short to compare clocks
                return
            self._calls = min(most, math.ceil(self._calls * max(1.2, min(1 / share, 8.0))))

    def _most_calls(self) -> int:
        """Return for how many calls there are memory and time."""
        reference, worker = self.reference, self.worker
        if self._device == "cpu":
            room = _CPU_RUN_BYTES // max(sum(reference.moved(self._given)), 1)
        else:
            reserve(worker, [self._given], reference.results)
            room = worker.inputs.size // max(worker.inputs.end, worker.outputs.end, 1)
        slowest = max(reference.drawing_seconds / _DRAWING_SECONDS, reference.seconds / _EQUAL_SECONDS, 1e-6)
        return max(_LEAST_CALLS, min(room, _MOST_CALLS, int(1 / slowest)))

    def check_repeats(self) -> None:
        """Reject a candidate that is much faster on equal inputs than on different ones, if eager is not."""
        if self._share_of_repeats(CANDIDATE, _FEW_RUNS) >= _CLEAR:
            return
        # Equal inputs may be in the cache, and a busy machine disturbs runs: many of them tell, several times.
        for _ in range(_FEW_RUNS):
            share, eagers = (self._share_of_repeats(name, _MANY_RUNS) for name in (CANDIDATE, EAGER))
            if share >= _SKIPPED * min(eagers, 1.0):
                return
        text = f"calls with equal values take {share:.0%} of the time of calls with different ones; compute each result"
        raise RejectedError("cached-result", text, describe(self.reference, self._given))

    def _share_of_repeats(self, name: str, number: int) -> float:
        """Return the time of calls with equal values, divided by that of calls with different ones.

        On a CPU this is CPU time: on a busy machine, the clock says little about single runs. There are `number` runs
        of each kind, or fewer if they take long.
        """
        # The start of a run, on a busy machine, is not part of the work that could be skipped.
        start, most = _START[self._device], max(self._calls, self._most_calls())
        count = min(max(self._calls, _LEAST_EQUAL), most)
        overhead = _RunTime(*(total / self._calls for total in self._copying))
        while count < most:
            least = min(self._run(name, self._new_calls(count)).seconds for _ in range(2))
            if _net(least, overhead.seconds * count) >= _LONG_RUN[self._device] * start:
                break
            count = min(2 * count, most)
        different: list[Arguments] = []
        taken: dict[bool, list[float]] = {True: [], False: []}
        end = time.monotonic() + _EQUAL_SECONDS
        for turn in range(number):
            if turn > _FEW_RUNS and time.monotonic() > end:
                break
            if not different or name == CANDIDATE:  # which may know values that it has seen
                different = self._new_calls(count)
            taken[False].append(self._run(name, different).effort)
            taken[True].append(self._run(name, self._new_calls(1) * count).effort)
        # The least of several: other work on the machine only adds time.
        same, other = (_net(min(taken[equal]), overhead.effort * count) for equal in (True, False))
        return (same + start) / (other + start)

    def _new_calls(self, count: int) -> list[Arguments]:
        return [self.reference.arguments(self.choice.getrandbits(48)) for _ in range(count)]

    def _run(self, name: str, calls: Sequence[Arguments]) -> _RunTime:
        """Return the duration of one run, and keep its results for `_compare`."""
        worker = self.worker if name == CANDIDATE else self.peers.workers[name]
        results = self.reference.accepted if name == CANDIDATE else self.reference.results
        placed, slots = reserve(worker, calls, results)
        # What the calls have beside tensors is sent with the command that is timed, unless it is that of other calls.
        skeletons, known = [skeleton for skeleton, *_ in placed], pickle.dumps(self._given.skeleton)
        usual = self._given.skeleton if all(pickle.dumps(skeleton) == known for skeleton in skeletons) else None
        worker.ask("prepare", [(usual, *call[1:]) for call in placed], slots, seconds=self.limit)
        # From here on, the worker's processes run only while the clock does, and none slows down another worker.
        worker.stop()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # others would spin for milliseconds after their work, on the cores of a worker
        fill(worker, placed, calls)
        before = worker.inputs.raw(worker.inputs.end).clone() if name == CANDIDATE else None
        self._flushed.sum()
        torch.set_num_threads(threads)
        synchronize(self._device)
        taken, reported = self._timed(worker, "run", self.number, calls[0].seed, None if usual else skeletons)
        if before is not None:
            # In an order that the candidate cannot foresee, for it may still write to a GPU's memory.
            order = self.choice.sample(range(len(slots)), len(slots))
            copies = {call: [worker.outputs.tensor(slot).clone() for slot in slots[call]] for call in order}
            self._results = [copies[call] for call in range(len(slots))]
            changed = not torch.equal(before, worker.inputs.raw(worker.inputs.end))
            if changed and not self.reference.may_change:
                raise RejectedError(
                    "input-changed", "it changes its inputs when it is timed", describe(self.reference, calls[0])
                )
            self._reported.append((taken.seconds, reported_seconds(reported)))
        elif name == EAGER:
            self._start = min(self._start, taken.seconds - reported_seconds(reported))
            self._expected = [[worker.outputs.tensor(slot) for slot in call] for call in slots]
        return taken

    def _one_result(self, calls: Sequence[Arguments], given: Arguments) -> Tensors:
        """Return the results of one call, in place of another one of a run, which does not count."""
        # A run has one seed: only its first call draws the random numbers that the reference draws alone.
        place = self.choice.randrange(len(calls)) if self.reference.has_exact else 0
        self._run(CANDIDATE, [*calls[:place], given, *calls[place + 1 :]])
        self._reported.pop()
        return self._results[place]

    def _compare(self, calls: Sequence[Arguments]) -> None:
        """Compare the candidate's results of the timed calls with eager's."""
        for given, results, expected in zip(calls, self._results, self._expected, strict=True):
            if not self.checks.rules[self.number].agree(self.reference, given, results, expected):
                self.worker.check_finished()
                raise RejectedError(
                    "wrong-when-timed",
                    "a result of its timed calls is wrong, though the same shapes were right before: results must not "
                    "depend on earlier calls",
                    describe(self.reference, given),
                )

    def _timed(self, worker: WorkerProcess, *command: Any) -> tuple[_RunTime, Any]:
        """Return the duration of a command, and the value of its answer."""
        on_cpu = self._device == "cpu"
        before = worker.cpu_seconds() if on_cpu else 0.0
        seconds, value = worker.timed(*command, seconds=self.limit)
        if worker is self.peers.workers[EAGER]:
            self._suspending = min(self._suspending, worker.suspending)
        # A process may work until it is suspended, which many others make late.
        seconds += max(worker.suspending - self._suspending - _START[self._device], 0.0)
        return _RunTime(seconds, worker.cpu_seconds() - before if on_cpu else seconds), value

    def check_clock(self) -> None:
        """Reject a candidate whose process reports other times than this one's clock, in every run and in some more."""
        # On a busy machine this process may be late to see the end of a run, but not of every run.
        most = len(self._reported) + _MANY_RUNS
        while not any(map(self._agree, self._reported)):
            if len(self._reported) == most:
                taken, reported = (f"{seconds * 1e3:.3g} ms" for seconds in self._reported[-1])
                text = f"a run took {taken} by the judge's clock and {reported} by the clock in the candidate's process"
                raise RejectedError("clock-disagrees", text, describe(self.reference, self._given))
            self._run(CANDIDATE, self._new_calls(self._calls))

    def _agree(self, times: tuple[float, float]) -> bool:
        """Return whether the worker's clock agrees with the judge's, whose time has the start and end of a run."""
        taken, reported = times
        return abs(taken - reported) - max(_START[self._device], self._start) <= _DISAGREEMENT * taken


def reported_seconds(answer: object) -> float:
    """Return the time that a worker reports; infinity, which no clock agrees with, if it is not a time."""
    return answer if isinstance(answer, float) and math.isfinite(answer) else math.inf


def _net(taken: float, overhead: float) -> float:
    """Return a run's time without that of copying results: at least a fifth, for it has written the copied results."""
    return max(taken - overhead, 0.2 * taken)
