"""The part of a verdict that is about speed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from kernel_builder.api import Clock, Estimate, clock, copies, estimate, sets_needed
from kernel_judge.judge.peer_workers import EAGER
from kernel_judge.judge.reference import Arguments, Reference
from kernel_judge.judge.result_checks import describe
from kernel_judge.judge.verdict import Speedup

CANDIDATE = "candidate"  # beside the names of its peers
_UNCERTAIN = 2.0  # the ends of an interval
_SPREAD = 3.0  # of the speedups at different shapes
_BEYOND_COPIES = 2.0  # times copy speed; kernels that are bound by memory have 1, and caches help some


@dataclass
class SpeedReport:
    """The part of a verdict that is about speed."""

    speed: dict[str, Speedup] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    share_of_copy_speed: float | None = None
    share_of_peak: float | None = None
    suspicious: list[str] = field(default_factory=list)
    cases: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass
class TimedShape:
    """The samples of one shape: seconds of a call, by participant."""

    reference: Reference
    given: Arguments
    calls: int
    seconds: dict[str, list[float]]


def report_speed(shapes: Sequence[TimedShape], timer: Clock) -> SpeedReport:
    """Return the speed over all timed shapes, beside each peer and a copy, and suspicious facts."""
    report = SpeedReport()
    ratios: dict[str, list[Estimate]] = {}
    shares, peaks = [], []
    for shape in shapes:
        ours = shape.seconds[CANDIDATE]
        for name, taken in shape.seconds.items():
            if name != CANDIDATE:
                ratio = estimate([peer / own for peer, own in zip(taken, ours, strict=True)])
                ratios.setdefault(name, []).append(ratio)
        milliseconds = {name: _short(statistics.median(taken) * 1e3) for name, taken in shape.seconds.items()}
        moved = shape.reference.moved(shape.given)
        shares.append(_copy_seconds(moved, shape.reference.device, timer) / statistics.median(ours))
        if peak := _share_of_peak(shape, statistics.median(ours)):
            peaks.append(peak)
        case = describe(shape.reference, shape.given)
        report.cases.append({**case, "bytes": moved, "calls": shape.calls, "milliseconds": milliseconds})
    for name, each in ratios.items():
        columns = zip(*each, strict=True)
        report.speed[name] = Speedup(*(_short(statistics.geometric_mean(column)) for column in columns))
    report.share_of_copy_speed = _short(statistics.geometric_mean(shares))
    report.share_of_peak = _short(statistics.geometric_mean(peaks)) if len(peaks) == len(shapes) else None
    if report.share_of_copy_speed > _BEYOND_COPIES:
        report.suspicious.append(
            f"It is {report.share_of_copy_speed:.3g} times as fast as a copy of its inputs, parameters and results: it "
            "does not need all of them, or its time is not that of its work."
        )
    low, high = report.speed[EAGER][1:]
    if high > _UNCERTAIN * low:
        report.suspicious.append(
            f"Its speed is uncertain, {low:.3g} to {high:.3g} times eager's: other work may have kept the machine "
            "busy. Judge it again."
        )
    medians = [ratio.median for ratio in ratios[EAGER]]
    if max(medians) > _SPREAD * min(medians):
        named = ", ".join(f"{median:.3g}" for median in medians)
        report.suspicious.append(
            f"Its speed depends on the shape: it is {named} times as fast as eager at the shapes timed."
        )
    return report


def _copy_seconds(moved: int, device: str, timer: Clock) -> float:
    with timer.context():
        run, _ = copies(max(moved, 4096), min(sets_needed(timer.cache, moved), 64), device, timer)
        return min(run() for _ in range(3))


def _share_of_peak(shape: TimedShape, seconds: float) -> float | None:
    """Return the share of the speed of a large matrix product in the same dtype; None if there is little arithmetic."""
    if shape.given.grads is not None:
        return None
    operations = _operations(shape)
    if operations < 30 * shape.reference.moved(shape.given):
        return None
    size = 1024 if shape.reference.device == "cpu" else 8192
    dtype = getattr(torch, shape.reference.dtype or "float32")
    matrix = torch.randn(size, size, device=shape.reference.device).to(dtype)
    timer = clock(shape.reference.device)
    with timer.context():
        run, _ = timer.series([lambda: matrix @ matrix])
        peak = 2 * size**3 / min(run() for _ in range(3))
    return _short(operations / seconds / peak)


def _operations(shape: TimedShape) -> int:
    """Return how many floating-point operations a call takes in products and convolutions, as Torch counts them."""
    counting = _Counting()
    with counting:
        shape.reference.eager(shape.given)
    return counting.operations


class _Operations:
    """Counts the arithmetic of the operations of Torch that are called, by Torch's own formulas.

    `FlopCounterMode`, which does the same, imports Torch's compiler, which takes 2 s.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        if formula := flop_registry.get(function.overloadpacket):
            self.operations += formula(*arguments, **options, out_val=result)
        return result


class _Counting(_Operations, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For a method that this class itself defines, Torch would import its compiler, so as to keep it away from it."""


def _short(value: float) -> float:
    return float(f"{value:.4g}")
