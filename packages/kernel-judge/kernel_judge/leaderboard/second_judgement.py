"""Judge the best results of a leaderboard again, on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kernel_format.files import temporary_directory
from kernel_judge.judge.verdict import Verdict, cause
from kernel_judge.leaderboard.result import Result, ranked
from kernel_judge.search.local_judge import JUDGE_COMMAND, LocalJudge

_SECONDS = 900


class Comparison(NamedTuple):
    """Whether a second judgement agrees with a result, and both in one line."""

    agrees: bool
    text: str


def judge_again(results: Sequence[Result], count: int, command: Sequence[str] = JUDGE_COMMAND) -> Iterator[Comparison]:
    """Judge the `count` fastest results of each task and device again, of those with a valid signature.

    Others could run any code here: a task's code runs outside of the sandbox.

    A second verdict agrees if it is the same word and the intervals of the speeds relative to eager overlap.

    Raises:
        ConfigError: If a result does not have its code or its task.
    """
    for group in ranked(results, only_valid=True).values():
        for result in group[:count]:
            yield _judge_again(result, command)


def _judge_again(result: Result, command: Sequence[str]) -> Comparison:
    with temporary_directory() as scratch:
        paths = {}
        for part in ("candidate", "task"):
            (directory := scratch / part).mkdir()
            paths[part] = result.unpacked(part, directory)
        judged = LocalJudge(paths["task"], seconds=_SECONDS, command=command).judge(paths["candidate"])
    first, second = result.verdict, judged.verdict
    about = f"{result.candidate}, {first.task}"
    if second is None:
        return Comparison(False, f"does not agree: {about}: {cause(judged.error or '')}")
    agrees = (second.verdict, second.task_digest) == (first.verdict, first.task_digest)
    before, now = first.speed.get("eager"), second.speed.get("eager")
    if before and now:
        agrees &= before.low <= now.high and now.low <= before.high
    word = "agrees" if agrees else "does not agree"
    return Comparison(agrees, f"{word}: {about}: {_summary(second)}, before {_summary(first)}")


def _summary(verdict: Verdict) -> str:
    speed = verdict.speed.get("eager")
    return f"{f'{speed} times eager' if speed else verdict.verdict} on {verdict.device}"
