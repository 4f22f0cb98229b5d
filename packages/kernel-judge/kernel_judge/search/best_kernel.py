"""Choose the best kernel of a search: the fastest right candidate that is faster than the reference.

A speed that was chosen because it was the largest of many is too large on average, so that candidate is judged once
more, with other inputs. The reference stays the best until a candidate has passed twice.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kernel_judge.judge.verdict import RIGHT, Notify, Verdict, cause
from kernel_judge.search.local_judge import Judge, Judged
from kernel_judge.search.run_log import REFERENCE_PEER, TRY_ENDED, VERIFIED, Event, RunLog
from kernel_judge.search.workspace import Workspace


class Contender(NamedTuple):
    """A candidate that may become the best: its origin, and its speed relative to the reference."""

    attempt: int
    number: int
    candidate: str
    agent: str
    ratio: float

    @property
    def program(self) -> str:
        """The agent's program. Its arguments are not for publication: they may contain a key."""
        return Path(shlex.split(self.agent)[0]).name


def contenders(events: Iterable[Event]) -> list[Contender]:
    """Return the right candidates that are faster than the reference, the fastest first; equal ones once."""
    by_digest: dict[str, Contender] = {}
    for event in events:
        if event["event"] != TRY_ENDED or event["outcome"] != RIGHT:
            continue
        ratio = _ratio(Judged.from_dict(event["judged"]).verdict)
        if ratio > 1.0:
            key = event["candidate"]
            by_digest.setdefault(key, Contender(event["attempt"], event["try"], key, event["agent"], ratio))
    return sorted(by_digest.values(), key=lambda contender: (-contender.ratio, contender.attempt, contender.number))


def choose(log: RunLog, judge: Judge, run: Path, notify: Notify) -> tuple[Contender, Verdict] | None:
    """Verify contenders until none of the others can be faster; return the best and its second verdict.

    A contender is judged again only if its first verdict has a higher speed than the second one of the best so far.
    None means that the reference is the best.
    """
    best: tuple[Contender, Verdict] | None = None
    for contender in contenders(log.events):
        fastest = _ratio(best[1]) if best else 1.0
        if contender.ratio <= fastest:
            break
        second = _verified(log, judge, run, contender)
        verdict = second.verdict
        ratio = _ratio(verdict)
        if verdict and verdict.is_right and ratio > fastest:
            best = contender, verdict
        else:
            reason = verdict.reason if verdict else second.error
            notify(
                f"attempt {contender.attempt}, try {contender.number} is not the best: {contender.ratio:.2f} times the "
                f"speed of {REFERENCE_PEER} at first, then {cause(reason) if reason else f'{ratio:.2f} times'}"
            )
    return best


def _ratio(verdict: Verdict | None) -> float:
    speed = verdict.speed.get(REFERENCE_PEER) if verdict else None
    return speed.ratio if speed else 0.0


def _verified(log: RunLog, judge: Judge, run: Path, contender: Contender) -> Judged:
    event = log.find(VERIFIED, candidate=contender.candidate)
    if event and event["judged"]["verdict"]:  # without a verdict, the judge itself had failed
        return Judged.from_dict(event["judged"])
    frozen = Workspace(run, contender.attempt, contender.number).frozen_candidate()
    assert frozen
    judged = judge(frozen)
    log.append(
        VERIFIED,
        attempt=contender.attempt,
        **{"try": contender.number},
        candidate=contender.candidate,
        judged=judged.as_dict(),
    )
    return judged
