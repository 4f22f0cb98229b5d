"""The judge rejects every cheat by its name, and passes every honest candidate."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_samples import CHEATS, HONEST
from judge_samples import quick

from kernel_judge.judge.judgement import judge

pytestmark = pytest.mark.attack


# `test_outside_inputs.py` judges the others in one process.
@pytest.mark.parametrize("name", [name for name, sample in CHEATS.items() if not sample.together])
def test_a_cheat_is_rejected_by_its_name(name: str, tmp_path: Path) -> None:
    verdict = judge(quick(CHEATS[name], tmp_path))
    assert (verdict.verdict, verdict.rejected_as) == ("wrong", CHEATS[name].rejected_as), verdict.reason
    assert verdict.reason and not verdict.speed


@pytest.mark.parametrize("name", [name for name, sample in HONEST.items() if not sample.together])
def test_an_honest_candidate_is_right(name: str, tmp_path: Path) -> None:
    verdict = judge(quick(HONEST[name], tmp_path))
    assert verdict.verdict == "right", (verdict.rejected_as, verdict.reason)
    assert not verdict.speed or verdict.speed["eager"].ratio > 0
