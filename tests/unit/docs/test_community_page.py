"""docs/compatibility.md shows the committed results, and its verdicts follow from them."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from tests.support.places import ROOT


@pytest.fixture
def community_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import community_page

    return community_page


@pytest.fixture
def results() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((ROOT / "benchmarks/results/community.json").read_text())
    return read


def test_the_page_is_written_from_the_results(community_page: ModuleType, results: dict[str, Any]) -> None:
    assert community_page.page(results) == (ROOT / "docs/compatibility.md").read_text()


def test_a_variant_that_is_not_built_is_a_missed_target(community_page: ModuleType, results: dict[str, Any]) -> None:
    outcome = results["projects"]["relu"]["variants"]["torch215-cxx11-cpu-x86_64-linux"]
    assert outcome["status"] == "built"
    outcome.update(status="failed", reason="the compiler refused relu.cpp")
    page = community_page.page(results)
    assert "| relu | torch215-cxx11-cpu-x86_64-linux | | " in page
    assert "| not built: the compiler refused relu.cpp |" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| CPU variants that are built")]
    assert row.endswith("| missed |")
