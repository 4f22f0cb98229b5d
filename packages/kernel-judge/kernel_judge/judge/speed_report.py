"""The part of a verdict that is about speed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_builder.api import Clock, Estimate, estimate
from kernel_judge.judge.peer_workers import EAGER
from kernel_judge.judge.reference import Arguments, Reference
from kernel_judge.judge.result_checks import describe
from kernel_judge.judge.speed_limit import Limit, measure_limit
from kernel_judge.judge.verdict import Speedup

CANDIDATE = "candidate"  # beside the names of its peers
_UNCERTAIN = 2.0  # the ends of an interval
_SPREAD = 3.0  # of the speedups at different shapes
_BEYOND_LIMIT = 1.05
_MORE_MEASUREMENTS = 4  # of a limit that a candidate seems to exceed


@dataclass
class SpeedReport:
    """The part of a verdict that is about speed, by the names of `Verdict`."""

    speed: dict[str, Speedup] = field(default_factory=dict)
    missing_peers: dict[str, str] = field(default_factory=dict)
    share_of_limit: float | None = None
    sol_score: float | None = None
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
    """Return the speed over all timed shapes, beside each peer and the limit, and suspicious facts."""
    report = SpeedReport()
    ratios: dict[str, list[Estimate]] = {}
    shares, scores, beyond = [], [], []
    for shape in shapes:
        ours = shape.seconds[CANDIDATE]
        for name, taken in shape.seconds.items():
            if name != CANDIDATE:
                ratio = estimate([peer / own for peer, own in zip(taken, ours, strict=True)])
                ratios.setdefault(name, []).append(ratio)
        seconds = {name: statistics.median(taken) for name, taken in shape.seconds.items()}
        limit = _limit(shape, seconds[CANDIDATE], timer)
        shares.append(limit.seconds / seconds[CANDIDATE])
        scores.append(limit.sol_score(seconds[CANDIDATE], seconds[EAGER]))
        case = describe(shape.reference, shape.given)
        if shares[-1] > _BEYOND_LIMIT >= limit.seconds / seconds[EAGER]:
            beyond.append(f"{shares[-1]:.3g} times as fast at {case['shapes']}")
        milliseconds = {name: _short(each * 1e3) for name, each in seconds.items()}
        report.cases.append({**case, "calls": shape.calls, "milliseconds": milliseconds, **_limit_facts(limit)})
    for name, each in ratios.items():
        columns = zip(*each, strict=True)
        report.speed[name] = Speedup(*(_short(statistics.geometric_mean(column)) for column in columns))
    report.share_of_limit = _short(statistics.geometric_mean(shares))
    report.sol_score = _short(statistics.fmean(scores))
    if beyond:
        report.suspicious.append(
            f"It is faster than this device's limit for the task's bytes and operations, as eager is not: "
            f"{', '.join(beyond)}. It leaves out work, computes in a lower precision or by another algorithm, or its "
            "time is not that of its work."
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


def _limit(shape: TimedShape, seconds: float, timer: Clock) -> Limit:
    """Return the limit of a shape, measured again while the candidate's time seems to be below it."""
    limit = measure_limit(shape.reference, shape.given, timer)
    for _ in range(_MORE_MEASUREMENTS):
        if limit.seconds <= seconds * _BEYOND_LIMIT:
            break
        limit = limit.raised(measure_limit(shape.reference, shape.given, timer))
    return limit


def _limit_facts(limit: Limit) -> dict[str, Any]:
    figures = {"milliseconds": limit.seconds * 1e3, "gigabytes-per-second": limit.memory_speed * 1e-9}
    figures |= {"gigaflops": limit.matrix_speed * 1e-9} if limit.matrix_speed else {}
    limits = {name: _short(figure) for name, figure in figures.items()}
    return {"bytes": limit.bytes, "operations": limit.operations, "limit": limits}


def _short(value: float) -> float:
    return float(f"{value:.4g}")
