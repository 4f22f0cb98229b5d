"""Fixtures of all tests of the judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tests that run at the same time would wait for each other's threads, and their calls seem long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def judge_calls(judge_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the quick judge writes a line for each call; device locks are apart from those of other tests."""
    calls = tmp_path / "judge-calls"
    calls.touch()
    monkeypatch.setenv("QUICK_JUDGE_CALLS", str(calls))
    return calls
