"""The page of the Hub's figures shows the committed results."""

from __future__ import annotations

import json

import pytest

from tests.conftest import ROOT


def test_the_page_is_written_from_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import hub

    report = json.loads((ROOT / "benchmarks/results/hub.json").read_text())
    assert hub.PAGE.markdown(report) == (ROOT / "docs/hub-figures.md").read_text()
