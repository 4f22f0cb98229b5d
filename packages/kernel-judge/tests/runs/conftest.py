"""The judge of quick searches counts its calls in a file."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def judge_calls(judge_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the quick judge writes a line for each call; device locks are apart from those of other tests."""
    calls = tmp_path / "judge-calls"
    calls.touch()
    monkeypatch.setenv("QUICK_JUDGE_CALLS", str(calls))
    return calls
