"""The part of a verdict that is about speed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_builder.api import Clock, Estimate, copies, estimate, sets_needed
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
    shares = []
    for shape in shapes:
        ours = shape.seconds[CANDIDATE]
        for name, taken in shape.seconds.items():
            if name != CANDIDATE:
                ratio = estimate([peer / own for peer, own in zip(taken, ours, strict=True)])
                ratios.setdefault(name, []).append(ratio)
        milliseconds = {name: _short(statistics.median(taken) * 1e3) for name, taken in shape.seconds.items()}
        moved = shape.reference.moved(shape.given)
        shares.append(_copy_seconds(moved, shape.reference.device, timer) / statistics.median(ours))
        case = describe(shape.reference, shape.given)
        report.cases.append({**case, "bytes": moved, "calls": shape.calls, "milliseconds": milliseconds})
    for name, each in ratios.items():
        columns = zip(*each, strict=True)
        report.speed[name] = Speedup(*(_short(statistics.geometric_mean(column)) for column in columns))
    report.share_of_copy_speed = _short(statistics.geometric_mean(shares))
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


def _short(value: float) -> float:
    return float(f"{value:.4g}")
