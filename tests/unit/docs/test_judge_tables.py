"""The tables of docs/judge.md and docs/skills.md are those of the results, and agents' runs are counted as said."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.support.places import ROOT


@pytest.fixture
def judge_tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import judge_tables

    return judge_tables


def run(task: str, skill: bool, eager: float | None) -> dict[str, Any]:
    verdict: dict[str, Any] = {"verdict": "wrong", "rejected-as": "wrong-result", "device": "a GPU"}
    if eager is not None:
        speed = {
            peer: {"ratio": ratio, "low": ratio, "high": ratio} for peer, ratio in (("eager", eager), ("compile", 2.0))
        }
        cases = [{"milliseconds": {"candidate": 0.05, "eager": 0.05 * eager}}]
        verdict = {"verdict": "right", "device": "a GPU", "speed": speed, "share-of-copy-speed": 0.876, "cases": cases}
    return {"task": task, "skill": skill, "minutes": 14.2, "kind": "project", "verdict": verdict}


def test_the_tables_are_written_from_the_results(judge_tables: ModuleType) -> None:
    for path, text in judge_tables.filled().items():
        assert path.read_text() == text, "run benchmarks/judge_tables.py"


def test_a_wrong_candidate_counts_as_the_reference(judge_tables: ModuleType) -> None:
    runs = [run("a", False, 4.0), run("a", True, None), run("b", False, 2.0), run("b", True, 9.0)]
    text = judge_tables.agents({"agent": "one", "date": "2026-01-01", "skill-version": "1.0", "runs": runs})
    assert "| `a` | without | 14 | right | 50.0 | 0.88 | 4.00 | 2.00 |" in text
    assert "| `a` | with | 14 | wrong-result | - | - | - | - |" in text
    assert "| without | 2 of 2 | 2.83 | 2.00 | 14.2 |" in text and "| with | 1 of 2 | 3.00 | 1.41 | 14.2 |" in text
    assert "faster on 1 of 2 tasks and slower on 1" in text
