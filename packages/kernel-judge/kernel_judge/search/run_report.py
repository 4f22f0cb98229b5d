"""The figures of searches by agent, context and level, computed from their logs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kernel_format.errors import ConfigError
from kernel_judge.judge.verdict import RIGHT, Verdict, cause
from kernel_judge.search import best_kernel, estimators
from kernel_judge.search.local_judge import Judged
from kernel_judge.search.run_log import FINISHED, LOG, REFERENCE_PEER, STARTED, TRY_ENDED, Event, read_events
from kernel_judge.search.workspace import Workspace

Table = list[list[str]]
THRESHOLDS = (1.0, 1.5, 2.0)  # of fast_p
_NAME = 40  # characters of an agent's command in a table


class TryResult(NamedTuple):
    """The result of one call of an agent.

    Attributes:
        outcome: "right", "wrong", "no-candidate" or "no-verdict".
        reason: Why it is not right; empty if it is.
        verdict: The judge's; None without one.
        code: The agent's kernel, a file or a directory; None if it is missing.
        log: The agent's output.
    """

    number: int
    outcome: str
    reason: str
    verdict: Verdict | None
    code: Path | None
    log: Path

    def speed(self, peer: str) -> str:
        """Return the speed beside a peer with its interval, in words; empty without one."""
        speed = self.verdict.speed.get(peer) if self.verdict else None
        return f"{speed.ratio:.2f} ({speed.low:.2f} to {speed.high:.2f})" if speed else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the try as `--json` prints it."""
        return {
            "try": self.number,
            "outcome": self.outcome,
            "reason": self.reason,
            "speed": {peer: speed._asdict() for peer, speed in self.verdict.speed.items()} if self.verdict else {},
            "suspicious": list(self.verdict.suspicious) if self.verdict else [],
            "code": str(self.code) if self.code else None,
            "log": str(self.log),
        }


class AttemptResult(NamedTuple):
    """The outcome of one attempt: the speed of its fastest right try, or None if none is right.

    Times are in seconds. `tries` is how many tries the attempt has in the log, and
    `details` their results.
    """

    task: str
    level: str
    agent: str
    context: str
    number: int
    tries: int
    first_right: int | None
    speed: float | None
    busy_seconds: float
    details: Sequence[TryResult] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the attempt as `--json` prints it."""
        values = {key.replace("_", "-"): value for key, value in self._asdict().items()}
        return {**values, "details": [each.as_dict() for each in self.details]}


@dataclass(frozen=True)
class Group:
    """Figures of attempts that have something in common. Those of several tasks are means over the tasks.

    Attributes:
        by: The common property: "all", "agent", "context" or "level".
        name: Its value.
        tasks: The number of tasks.
        attempts: The number of attempts.
        right: How many are right.
        pass_at: k -> pass@k, an arithmetic mean over tasks.
        speedup_at: k -> speedup@k with floor 1.0, a geometric mean over tasks.
        fast: p -> fast_p, an arithmetic mean over tasks.
        geometric_mean: Of the speeds of all attempts, each at least 1.0.
        median: Of the same.
        seconds: The mean time of an attempt, with that of the judge.
    """

    by: str
    name: str
    tasks: int
    attempts: int
    right: int
    pass_at: Mapping[int, float]
    speedup_at: Mapping[int, float]
    fast: Mapping[float, float]
    geometric_mean: float
    median: float
    seconds: float


@dataclass(frozen=True)
class RunReport:
    """The figures of one search or several.

    Attributes:
        peer: The peer that speeds are relative to.
        unfinished: Attempts that are planned and not in the log with all of their tries; they are left out.
    """

    peer: str
    attempts: Sequence[AttemptResult]
    groups: Sequence[Group]
    best: Sequence[Mapping[str, Any]]
    unfinished: int

    def as_dict(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        return {
            "peer": self.peer,
            "unfinished": self.unfinished,
            "best": list(self.best),
            "groups": [{key.replace("_", "-"): value for key, value in asdict(group).items()} for group in self.groups],
            "attempts": [attempt.as_dict() for attempt in self.attempts],
        }


def make_report(runs: Iterable[Path], peer: str, ks: Sequence[int] = ()) -> RunReport:
    """Return the report on the searches in some directories.

    Args:
        peer: "eager", "compile" or "max-autotune".
        ks: The values of k; 1, 2, 4 and so on without any.

    Raises:
        ConfigError: If a directory has no log of a search, no attempt is finished, or a right one has no speed
            relative to the peer.
    """
    attempts: list[AttemptResult] = []
    best: list[Mapping[str, Any]] = []
    planned = 0
    for run in runs:
        events = _events(run)
        settings = [event for event in events if event["event"] == STARTED]
        if not settings:
            continue
        planned += settings[-1]["attempts"]
        attempts += _attempts(events, settings[-1], peer, run)
        for event in [event for event in events if event["event"] == FINISHED][-1:]:
            kept = event["best"]
            reasons = best_kernel.explained(events, kept["candidate"] if kept else None)
            best.append({"task": settings[-1]["task"], "best": kept, "explained": reasons})
    if not attempts:
        raise ConfigError(
            "no attempt is finished", where=", ".join(map(str, runs)), hint="run the search again: it goes on"
        )
    ks = ks or [2**power for power in range(12) if 2**power <= _fewest(attempts)]
    groups = [_group("all", "all", attempts, ks)]
    keys: dict[str, Callable[[AttemptResult], str]] = {
        "agent": lambda attempt: attempt.agent,
        "context": lambda attempt: attempt.context,
        "level": lambda attempt: attempt.level,
    }
    for by, key in keys.items():
        parts = _parted(attempts, key)
        if len(parts) > 1:
            groups += [_group(by, name, part, ks) for name, part in parts.items()]
    return RunReport(peer, attempts, groups, best, planned - len(attempts))


def _events(run: Path) -> list[Event]:
    try:
        return read_events(run / LOG)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no {LOG}", where=str(run), hint="name the directory of a search, its --run"
        ) from error


def _attempts(events: Iterable[Event], settings: Event, peer: str, run: Path) -> list[AttemptResult]:
    tries: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["event"] == TRY_ENDED:
            tries[event["attempt"]].append(event)
    finished = {number: ended for number, ended in sorted(tries.items()) if len(ended) == settings["tries"]}
    return [_attempt(number, ended, settings, peer, run) for number, ended in finished.items()]


def _attempt(number: int, tries: Sequence[Event], settings: Event, peer: str, run: Path) -> AttemptResult:
    speeds, busy = [], 0.0
    for event in tries:
        busy += event["agent-seconds"]
        if event["judged"] and not event["judged-as"]:
            busy += event["judged"]["seconds"]
        if event["outcome"] == RIGHT:
            verdict = Judged.from_dict(event["judged"]).verdict
            assert verdict
            if peer not in verdict.speed:
                raise ConfigError(
                    f"the verdict on attempt {number}, try {event['try']} has no speed relative to {peer}",
                    where=str(run),
                    hint=f"choose --against from {', '.join(verdict.speed) or 'nothing: the judge measured no peer'}",
                )
            speeds.append(verdict.speed[peer].ratio)
    right = [event["try"] for event in tries if event["outcome"] == RIGHT]
    return AttemptResult(
        task=settings["task"],
        level=str(settings["level"] or "none"),
        agent=tries[0]["agent"],
        context=",".join(tries[0]["context"]) or "none",
        number=number,
        tries=len(tries),
        first_right=min(right, default=None),
        speed=max(speeds, default=None),
        busy_seconds=busy,
        details=[_try(event, run) for event in tries],
    )


def _try(event: Event, run: Path) -> TryResult:
    judged = Judged.from_dict(event["judged"]) if event["judged"] else None
    verdict = judged.verdict if judged else None
    reason = verdict.reason if verdict else (judged.error or "" if judged else "the agent wrote no candidate")
    workspace = Workspace(run, event["attempt"], event["try"])
    return TryResult(event["try"], event["outcome"], reason, verdict, workspace.frozen_candidate(), workspace.log)


def _parted(attempts: Iterable[AttemptResult], key: Callable[[AttemptResult], str]) -> dict[str, list[AttemptResult]]:
    parts: dict[str, list[AttemptResult]] = defaultdict(list)
    for attempt in attempts:
        parts[key(attempt)].append(attempt)
    return parts


def _fewest(attempts: Iterable[AttemptResult]) -> int:
    return min(len(part) for part in _parted(attempts, lambda attempt: attempt.task).values())


def _floored(speed: float | None) -> float:
    return max(speed or 1.0, 1.0)


def _group(by: str, name: str, attempts: Sequence[AttemptResult], ks: Iterable[int]) -> Group:
    tasks = list(_parted(attempts, lambda attempt: attempt.task).values())
    possible = [k for k in ks if k <= min(map(len, tasks))]
    floored = [_floored(attempt.speed) for attempt in attempts]
    return Group(
        by,
        name,
        tasks=len(tasks),
        attempts=len(attempts),
        right=sum(attempt.speed is not None for attempt in attempts),
        pass_at={
            k: statistics.fmean(
                estimators.pass_at_k(len(task), sum(attempt.speed is not None for attempt in task), k) for task in tasks
            )
            for k in possible
        },
        speedup_at={
            k: statistics.geometric_mean(
                estimators.speedup_at_k([_floored(attempt.speed) for attempt in task], k) for task in tasks
            )
            for k in possible
        },
        fast={
            p: statistics.fmean(estimators.fast_p([attempt.speed for attempt in task], p) for task in tasks)
            for p in THRESHOLDS
        },
        geometric_mean=statistics.geometric_mean(floored),
        median=statistics.median(floored),
        seconds=statistics.fmean(attempt.busy_seconds for attempt in attempts),
    )


def summary_table(report: RunReport) -> Table:
    """Return one row for each group."""
    ks = sorted({k for group in report.groups for k in group.pass_at})
    head = ["", "tasks", "attempts", *(f"pass@{k}" for k in ks), *(f"speedup@{k}" for k in ks)]
    table = [[*head, *(f"fast_{p:g}" for p in THRESHOLDS), "geomean", "median", "s/attempt"]]
    for group in report.groups:
        table.append(
            [
                group.name if group.by == "all" else f"{group.by}: {shortened(group.name)}",
                str(group.tasks),
                str(group.attempts),
                *(f"{group.pass_at[k]:.2f}" if k in group.pass_at else "-" for k in ks),
                *(f"{group.speedup_at[k]:.2f}" if k in group.speedup_at else "-" for k in ks),
                *(f"{group.fast[p]:.2f}" for p in THRESHOLDS),
                f"{group.geometric_mean:.2f}",
                f"{group.median:.2f}",
                f"{group.seconds:.1f}",
            ]
        )
    return table


def format_table(table: Table) -> str:
    """Return a table with aligned columns for a terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(f"{row[0]:<{widths[0]}}{line[widths[0] :]}" for row, line in zip(table, rows, strict=True))


def shortened(name: str) -> str:
    """Return the name of an agent for a table; commands may be long."""
    return name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."


def notes(report: RunReport) -> list[str]:
    """Return notes on the table, in sentences."""
    lines = [
        f"Speeds are relative to {report.peer}, and at least 1.0: where no kernel is faster, the reference is used.",
    ]
    if report.unfinished:
        lines.append(f"{report.unfinished} planned attempts are not finished and left out.")
    for entry in report.best:
        best = entry["best"]
        if best:
            lines.append(
                f"Best for {entry['task']}: attempt {best['attempt']}, try {best['try']} ({best['agent']}), "
                f"{best['speed']:.2f} times the speed of eager in its second verdict{best_remark(best)}."
            )
        else:
            lines.append(f"Best for {entry['task']}: the reference; no candidate is right and faster.")
        lines += entry["explained"]
    return lines


def best_remark(best: Mapping[str, Any]) -> str:
    """Return a remark on the best kernel if it is PyTorch alone, else an empty string."""
    verdict = Judged.from_dict({"verdict": best["verdict"], "error": None, "seconds": 0.0, "waited": 0.0}).verdict
    return "; it has no kernel of its own" if verdict and verdict.is_plain_torch else ""


def attempt_lines(report: RunReport) -> list[str]:
    """Return each try: its speed and interval or the reason, suspicious facts, code and log."""
    lines = []
    for attempt in report.attempts:
        for each in attempt.details:
            speed = each.speed(report.peer) or each.speed(REFERENCE_PEER)
            lines.append(
                f"{attempt.task}, attempt {attempt.number}, try {each.number} ({shortened(attempt.agent)}): "
                f"{each.outcome}{f', {speed}' if speed else ''}{f': {cause(each.reason)}' if each.reason else ''}"
            )
            lines += [f"  suspicious: {fact}" for fact in (each.verdict.suspicious if each.verdict else ())]
            lines += [f"  code: {each.code}"] if each.code else []
            lines.append(f"  log:  {each.log}")
    return lines
