"""The page of the Hub's figures shows the committed results."""

from __future__ import annotations

import json

import pytest

from tests.conftest import ROOT


def test_the_page_is_written_from_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import figures
    import hub

    report = json.loads((ROOT / "benchmarks/results/hub.json").read_text())
    measured = [figures.Figure(**figure) for figure in report["figures"]]
    assert hub.as_markdown(report["machine"], measured) == (ROOT / "docs/hub-figures.md").read_text()
