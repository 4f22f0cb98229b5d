"""Choose the best kernel of a search: the fastest right candidate that is faster than the reference.

A speed that was chosen because it was the largest of many is too large on average, so that candidate is judged once
more, with other inputs. The reference stays the best until a candidate has passed twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kernel_judge.judge.verdict import Notify, Verdict, cause
from kernel_judge.search.local_judge import Judge, Judged
from kernel_judge.search.run_log import REFERENCE_PEER, VERIFIED, RunLog
from kernel_judge.search.tries import Try, tries_of


def contenders(tries: Iterable[Try]) -> list[Try]:
    """Return the tries with right candidates that are faster than the reference, the fastest first; equal ones once."""
    by_digest: dict[str | None, Try] = {}
    for each in tries:
        if each.ratio > 1.0:
            by_digest.setdefault(each.candidate, each)
    return sorted(by_digest.values(), key=lambda each: (-each.ratio, each.attempt, each.number))


def choose(log: RunLog, judge: Judge, run: Path, notify: Notify) -> tuple[Try, Verdict] | None:
    """Verify contenders until none of the others can be faster; return the best and its second verdict.

    A contender is judged again only if its first verdict has a higher speed than the second one of the best so far.
    None means that the reference is the best.
    """
    best: tuple[Try, Verdict] | None = None
    for contender in contenders(tries_of(log.events, run)):
        fastest = best[1].ratio if best else 1.0
        if contender.ratio <= fastest:
            break
        second = _verified(log, judge, contender)
        verdict = second.verdict
        if verdict and verdict.is_right and verdict.ratio > fastest:
            best = contender, verdict
        else:
            reason = verdict.reason if verdict else second.error
            then = cause(reason) if reason else f"{verdict.ratio if verdict else 0:.2f} times"
            notify(
                f"attempt {contender.attempt}, try {contender.number} is not the best: {contender.ratio:.2f} times the "
                f"speed of {REFERENCE_PEER} at first, then {then}"
            )
    return best


def _verified(log: RunLog, judge: Judge, contender: Try) -> Judged:
    event = log.find(VERIFIED, candidate=contender.candidate)
    if event and event["judged"]["verdict"]:  # without a verdict, the judge itself had failed
        return Judged.from_dict(event["judged"])
    frozen = contender.workspace.frozen_candidate()
    assert frozen
    judged = judge(frozen)
    about = {"attempt": contender.attempt, "try": contender.number, "candidate": contender.candidate}
    log.append(VERIFIED, **about, judged=judged.as_dict())
    return judged
