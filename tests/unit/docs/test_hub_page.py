"""The page of the Hub's figures shows the committed results, and the figures' verdicts follow from their values."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from tests.support.places import ROOT


@pytest.fixture
def hub_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import hub

    return hub


def test_the_page_is_written_from_the_results(hub_page: ModuleType) -> None:
    report = json.loads((ROOT / "benchmarks/results/hub.json").read_text())
    assert hub_page.PAGE.markdown(report) == (ROOT / "docs/hub-figures.md").read_text()


@pytest.mark.parametrize(
    ("seconds", "failed", "measured", "verdict"),
    [
        ({"median": 3.81, "p99": 4.07, "n": 64}, [], "p50 3.81 s, p99 4.07 s, 0 failed", "met"),
        ({"median": 3.81, "p99": 4.07, "n": 63}, ["ConnectionError()"], "p50 3.81 s, p99 4.07 s, 1 failed", "missed"),
        ({"n": 0}, ["ConnectionError()"], "1 failed", "missed"),
    ],
)
def test_a_client_that_fails_is_a_missed_target(
    hub_page: ModuleType, seconds: dict[str, float], failed: list[str], measured: str, verdict: str
) -> None:
    cpu = {"clients-processor-seconds": 6.6, "server-processor-seconds": 1.7, "server-peak-bytes": 111e6}
    row = hub_page.at_once_row({"seconds": seconds, "failed": failed, **cpu})
    assert (row.measured, row.verdict) == (measured, verdict)


def test_results_keep_a_summary_of_samples(hub_page: ModuleType) -> None:
    assert hub_page.summary([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0, "n": 3}
