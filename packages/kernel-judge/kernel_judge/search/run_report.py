"""The figures of searches by agent and context, computed from their logs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kernel_format.errors import ConfigError
from kernel_judge.judge.verdict import RIGHT, cause
from kernel_judge.search.run_log import FINISHED, LOG, REFERENCE_PEER, STARTED, read_events
from kernel_judge.search.tries import Try, agent_names, tries_of


class AttemptResult(NamedTuple):
    """One attempt. The speed is that of its fastest right try, None if none is right; seconds include the judge's."""

    task: str
    agent: str
    context: str
    number: int
    speed: float | None
    seconds: float
    tries: Sequence[Try]

    def as_dict(self) -> dict[str, Any]:
        """Return the attempt as `--json` prints it."""
        return {**self._asdict(), "tries": [_try_as_dict(each) for each in self.tries]}


@dataclass(frozen=True)
class Group:
    """Figures of attempts that have something in common: "all", or one "agent" or "context".

    Over several tasks, `pass_at` (k -> pass@k) is an arithmetic mean, `speedup_at` (k -> speedup@k) a geometric one.
    Speeds are at least 1.0.
    """

    by: str
    name: str
    tasks: int
    attempts: int
    right: int
    pass_at: Mapping[int, float]
    speedup_at: Mapping[int, float]
    seconds: float


@dataclass(frozen=True)
class RunReport:
    """The figures of one search or several.

    Attributes:
        peer: The peer that speeds are relative to.
        best: Of each finished search, its task and its best kernel.
        unfinished: The number of planned attempts whose tries are not all in the log; they are left out.
    """

    peer: str
    attempts: Sequence[AttemptResult]
    groups: Sequence[Group]
    best: Sequence[Mapping[str, Any]]
    unfinished: int

    def as_dict(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        groups = [{key.replace("_", "-"): value for key, value in asdict(group).items()} for group in self.groups]
        return {**vars(self), "groups": groups, "attempts": [attempt.as_dict() for attempt in self.attempts]}


def make_report(runs: Iterable[Path], peer: str) -> RunReport:
    """Return the report on the searches in some directories, relative to "eager", "compile" or "max-autotune"."""
    attempts: list[AttemptResult] = []
    best: list[Mapping[str, Any]] = []
    planned = 0
    logs = [(run, read_events(run / LOG)) for run in runs]
    names = agent_names(each.agent for run, events in logs for each in tries_of(events, run))
    for run, events in logs:
        settings = [event for event in events if event["event"] == STARTED]
        if not settings:
            continue
        planned += settings[-1]["attempts"]
        tries: dict[int, list[Try]] = defaultdict(list)
        for each in tries_of(events, run):
            tries[each.attempt].append(each)
        finished = [made for made in tries.values() if len(made) == settings[-1]["tries"]]
        attempts += [_attempt(made, settings[-1]["task"], peer, names) for made in finished]
        for event in [event for event in events if event["event"] == FINISHED][-1:]:
            found = event["best"] and {**event["best"], "agent": names[event["best"]["agent"]]}
            best.append({"task": settings[-1]["task"], "best": found})
    if not attempts:
        hint = "run the search again: it goes on"
        raise ConfigError("no attempt is finished", where=", ".join(map(str, runs)), hint=hint)
    groups = [_group("all", "all", attempts)]
    for by in ("agent", "context"):
        parts = _parted(attempts, by)
        if len(parts) > 1:
            groups += [_group(by, name, part) for name, part in parts.items()]
    return RunReport(peer, attempts, groups, best, planned - len(attempts))


def _attempt(tries: Sequence[Try], task: str, peer: str, names: Mapping[str, str]) -> AttemptResult:
    first = tries[0]
    speeds = []
    for each in tries:
        if each.outcome == RIGHT:
            if not (speed := each.speed(peer)):
                raise ConfigError(
                    f"the verdict on attempt {each.attempt}, try {each.number} has no speed relative to {peer}",
                    where=str(each.run),
                    hint="choose another --against, or search with another",
                )
            speeds.append(speed.ratio)
    return AttemptResult(
        task=task,
        agent=names[first.agent],
        context=",".join(first.context) or "none",
        number=first.attempt,
        speed=max(speeds, default=None),
        seconds=sum(each.agent_seconds + (each.judged.seconds if each.judged else 0.0) for each in tries),
        tries=tries,
    )


def _try_as_dict(made: Try) -> dict[str, Any]:
    candidate = made.workspace.frozen_candidate()
    return {
        "try": made.number,
        "outcome": made.outcome,
        "reason": made.reason,
        "speed": made.verdict.as_dict()["speed"] if made.verdict else {},
        "suspicious": list(made.verdict.suspicious) if made.verdict else [],
        "code": str(candidate) if candidate else None,
        "log": str(made.workspace.log),
    }


def _parted(attempts: Iterable[AttemptResult], by: str) -> dict[str, list[AttemptResult]]:
    parts: dict[str, list[AttemptResult]] = defaultdict(list)
    for attempt in attempts:
        parts[getattr(attempt, by)].append(attempt)
    return parts


def _group(by: str, name: str, attempts: Sequence[AttemptResult]) -> Group:
    tasks = [[attempt.speed for attempt in task] for task in _parted(attempts, "task").values()]
    # In place of a wrong or slow kernel, the reference is used.
    floored = [[max(speed or 1.0, 1.0) for speed in task] for task in tasks]
    right = [sum(speed is not None for speed in task) for task in tasks]
    ks = [2**power for power in range(12) if 2**power <= min(map(len, tasks))]
    return Group(
        by,
        name,
        tasks=len(tasks),
        attempts=len(attempts),
        right=sum(right),
        pass_at={
            k: statistics.fmean(pass_at_k(*count, k) for count in zip(map(len, tasks), right, strict=True)) for k in ks
        },
        speedup_at={k: statistics.geometric_mean(speedup_at_k(task, k) for task in floored) for k in ks},
        seconds=statistics.fmean(attempt.seconds for attempt in attempts),
    )


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """Return the probability that at least one of k attempts is right, estimated from more attempts than k.

    This is the share of all sets of k of the attempts that have a right one, 1 - C(n - c, k) / C(n, k), which is
    unbiased. `1 - (1 - c / n) ** k` is too small. Source: Chen et al., "Evaluating Large Language Models Trained on
    Code", arXiv:2107.03374, section 2.1.
    """
    return 1 - math.comb(attempts - right, k) / math.comb(attempts, k)


def speedup_at_k(speeds: Sequence[float], k: int) -> float:
    """Return the expected speed of the fastest of k attempts, estimated from the speeds of at least k attempts.

    This is the mean of the maximum over all sets of k of the attempts, which is unbiased. The attempt with the i-th
    smallest speed is the fastest of C(i - 1, k - 1) sets. Source: Nichols et al., "Can Large Language Models Write
    Parallel Code?", arXiv:2401.12554, where it is speedup_n@k. Unlike there, every attempt counts: one that is wrong
    has the speed 1, that of the reference which is used in its place.
    """
    chosen = (math.comb(index, k - 1) * speed for index, speed in enumerate(sorted(speeds)))
    return math.fsum(chosen) / math.comb(len(speeds), k)


def summary_lines(report: RunReport) -> list[str]:
    """Return a table with one row for each group, and notes on it."""
    ks = sorted({k for group in report.groups for k in group.pass_at})
    head = ["", "tasks", "attempts", *(f"pass@{k}" for k in ks), *(f"speedup@{k}" for k in ks)]
    rows = [[*head, "s/attempt"]]
    for group in report.groups:
        figures = [*(group.pass_at.get(k) for k in ks), *(group.speedup_at.get(k) for k in ks), group.seconds]
        name = group.name if group.by == "all" else f"{group.by}: {group.name}"
        numbers = ["-" if figure is None else f"{figure:.2f}" for figure in figures]
        rows.append([name, str(group.tasks), str(group.attempts), *numbers])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += ["", f"Speeds are relative to {report.peer}, and at least 1.0: the reference's, if no kernel is faster."]
    if report.unfinished:
        lines.append(f"{report.unfinished} planned attempts are not finished and left out.")
    for entry in report.best:
        if best := entry["best"]:
            lines.append(
                f"Best for {entry['task']}: attempt {best['attempt']}, try {best['try']} ({best['agent']}), "
                f"{best['speed']:.2f} times the speed of eager in its verification, the second verdict."
            )
        else:
            lines.append(f"Best for {entry['task']}: the reference; no candidate is right and faster.")
    return lines


def attempt_lines(report: RunReport) -> list[str]:
    """Return each try: its speed and interval or the reason, suspicious facts, code and log."""
    lines = []
    for attempt in report.attempts:
        for each in attempt.tries:
            speed = each.speed(report.peer) or each.speed(REFERENCE_PEER)
            lines.append(
                f"{attempt.task}, attempt {attempt.number}, try {each.number} ({attempt.agent}): "
                f"{each.outcome}{f', {speed}' if speed else ''}{f': {cause(each.reason)}' if each.reason else ''}"
            )
            lines += [f"  suspicious: {fact}" for fact in (each.verdict.suspicious if each.verdict else ())]
            code = each.workspace.frozen_candidate()
            lines += [f"  code: {code}"] if code else []
            lines.append(f"  log:  {each.workspace.log}")
    return lines
