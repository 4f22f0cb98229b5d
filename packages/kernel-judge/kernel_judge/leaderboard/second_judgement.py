"""Judge the best results of a leaderboard again, on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kernel_format.files import temporary_directory
from kernel_judge.judge.verdict import cause
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
    before, now = (verdict.speed.get("eager") if verdict else None for verdict in (first, second))
    agrees = second is not None and (second.verdict, second.task_digest) == (first.verdict, first.task_digest)
    if before and now:
        agrees &= before.low <= now.high and now.low <= before.high
    word = "agrees" if agrees else "does not agree"
    if second is None:
        reason = cause(judged.error or "")
    elif before and now:
        reason = f"{now} times eager on {second.device}, before {before} on {first.device}"
    else:
        reason = f"{second.verdict} on {second.device}, before {first.verdict} on {first.device}"
    return Comparison(agrees, f"{word}: {result.candidate}, {first.task}: {reason}")
