"""The clocks of a judgement may disagree for a while."""

from __future__ import annotations

import random

import pytest
from judge_samples import HERE

from kernel_judge.judge import speed
from kernel_judge.judge.reference import Arguments, Reference
from kernel_judge.judge.result_checks import RejectedError
from kernel_judge.judge.task import read_task


def reference(task: str) -> Reference:
    return Reference(read_task(HERE / "tasks" / f"{task}.py"), {}, None, "cpu", 0)


class LateRace(speed._TimedRuns):
    """A race whose first runs seem long to the judge, since it sees their end late."""

    def __init__(self, late: int) -> None:
        self._reference, self._device, self._choice, self._calls = reference("softmax"), "cpu", random.Random(0), 3
        self._given = self._reference.arguments(0)
        self._late, self._reported = late, [(0.020, 0.003)]

    def _run(self, name: str, calls: list[Arguments]) -> None:  # type: ignore[override]
        self._reported.append((0.020 if len(self._reported) < self._late else 0.004, 0.003))


def test_clocks_that_disagree_are_read_in_more_runs() -> None:
    LateRace(12).check_clock()
    with pytest.raises(RejectedError, match=r"20 ms by the judge's clock and 3 ms") as rejected:
        LateRace(100).check_clock()
    assert rejected.value.kind == "clock-disagrees"
