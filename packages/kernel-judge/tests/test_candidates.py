"""The judge rejects every cheat by its name, and passes every honest candidate."""

from __future__ import annotations

from pathlib import Path

import pytest
from judge_samples import CHEATS, HONEST, note, quick

from kernel_judge.judge.judgement import judge


@pytest.mark.parametrize("file", CHEATS, ids=lambda file: file.stem)
def test_a_cheat_is_rejected_by_its_name(file: Path) -> None:
    verdict = judge(quick(file))
    assert (verdict.verdict, verdict.rejected_as) == ("wrong", note(file, "rejected-as")), verdict.reason
    assert verdict.reason and not verdict.speed


@pytest.mark.parametrize(
    "file",
    # Those of `test_outside_inputs.py` run together in one process.
    [file for file in HONEST if not {"slow", "together"} & set(note(file, "options").split())],
    ids=lambda file: file.stem,
)
def test_an_honest_candidate_is_right(file: Path) -> None:
    verdict = judge(quick(file))
    assert verdict.verdict == "right", (verdict.rejected_as, verdict.reason)
    assert not verdict.speed or verdict.speed["eager"].ratio > 0
