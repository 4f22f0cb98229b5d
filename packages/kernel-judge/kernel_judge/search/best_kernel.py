"""Choose the best kernel of a search.

The best is the fastest right candidate that is faster than the reference. A speed that was chosen because it was the
largest of many is too large on average, so that candidate is judged once more, with other inputs, before it is called
the best. The reference stays the best until a candidate has passed twice.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kernel_judge.judge.verdict import RIGHT, Verdict, cause
from kernel_judge.search import mailbox
from kernel_judge.search.local_judge import Judge, Judged
from kernel_judge.search.run_log import REFERENCE_PEER, TRY_ENDED, VERIFIED, Event, RunLog
from kernel_judge.search.workspace import Workspace

FLOOR = 1.0  # the speed of the reference, which is used where no candidate is faster


class Contender(NamedTuple):
    """A candidate that may become the best: where it was made, and its speed beside the reference."""

    attempt: int
    number: int
    candidate: str
    agent: str
    ratio: float

    @property
    def program(self) -> str:
        """The agent's program. Its arguments are not for publication: they may have a key."""
        if mailbox.is_mailbox(self.agent):
            return "mailbox"
        return Path(shlex.split(self.agent)[0]).name


def contenders(events: Iterable[Event]) -> list[Contender]:
    """Return the right candidates that are faster than the reference, the fastest first; equal ones once."""
    by_digest: dict[str, Contender] = {}
    for event in events:
        if event["event"] != TRY_ENDED or event["outcome"] != RIGHT:
            continue
        verdict = Judged.from_dict(event["judged"]).verdict
        speed = verdict.speed.get(REFERENCE_PEER) if verdict else None
        if speed and speed.ratio > FLOOR:
            key = event["candidate"]
            by_digest.setdefault(key, Contender(event["attempt"], event["try"], key, event["agent"], speed.ratio))
    return sorted(by_digest.values(), key=lambda contender: (-contender.ratio, contender.attempt, contender.number))


def choose(log: RunLog, judge: Judge, run: Path) -> tuple[Contender, Verdict] | None:
    """Verify contenders until none of the others can be faster; return the best and its second verdict.

    A contender is judged again only if its first verdict has a higher speed than the second one of the best so far.
    None means that the reference is the best.
    """
    best: tuple[Contender, Verdict] | None = None
    for contender in contenders(log.events):
        if best and contender.ratio <= _ratio(best[1]):
            break
        verdict = _verified(log, judge, run, contender)
        if verdict and verdict.is_right and _ratio(verdict) > (_ratio(best[1]) if best else FLOOR):
            best = contender, verdict
    return best


def explained(events: Sequence[Event], kept: str | None) -> list[str]:
    """Return in sentences why candidates that seemed to be the fastest were not kept.

    Args:
        events: The log of a search.
        kept: The digest of the best candidate; None if it is the reference.
    """
    sentences = []
    verified = {event["candidate"]: Judged.from_dict(event["judged"]) for event in events if event["event"] == VERIFIED}
    for contender in contenders(events):
        if contender.candidate == kept or contender.candidate not in verified:
            continue
        second = verified[contender.candidate]
        if second.verdict is None:
            why = f"had no second verdict: {cause(second.error or '')}"
        elif not second.verdict.is_right:
            why = f"is wrong in its second verdict: {cause(second.verdict.reason)}"
        else:
            speed = second.verdict.speed[REFERENCE_PEER]
            why = f"has {speed.ratio:.2f} ({speed.low:.2f} to {speed.high:.2f}) in its second verdict"
        sentences.append(
            f"Not kept: attempt {contender.attempt}, try {contender.number}, measured as {contender.ratio:.2f} times "
            f"the speed of {REFERENCE_PEER}, {why}."
        )
    return sentences


def _ratio(verdict: Verdict) -> float:
    speed = verdict.speed.get(REFERENCE_PEER)
    return speed.ratio if speed else 0.0


def _verified(log: RunLog, judge: Judge, run: Path, contender: Contender) -> Verdict | None:
    event = log.find(VERIFIED, candidate=contender.candidate)
    if event is None or event["judged"]["verdict"] is None:  # without a verdict, the judge itself had failed
        frozen = Workspace(run, contender.attempt, contender.number).frozen_candidate()
        assert frozen
        judged = judge.judge(frozen)
        log.append(
            VERIFIED,
            attempt=contender.attempt,
            **{"try": contender.number},
            candidate=contender.candidate,
            judged=judged.as_dict(),
        )
        return judged.verdict
    return Judged.from_dict(event["judged"]).verdict
