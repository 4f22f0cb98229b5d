"""The page of the Hub's figures shows the committed results."""

from __future__ import annotations

import json
import statistics

import pytest

from tests.support.places import ROOT


def test_the_page_is_written_from_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import hub

    report = json.loads((ROOT / "benchmarks/results/hub.json").read_text())
    assert hub.PAGE.markdown(report) == (ROOT / "docs/hub-figures.md").read_text()


def test_the_measured_figures_follow_from_the_samples() -> None:
    """This test computes the figures from the samples, without the code that writes the page."""
    report = json.loads((ROOT / "benchmarks/results/hub.json").read_text())
    figures = {figure["name"]: figure for figure in report["figures"]}
    values = {name: figure["values"] for name, figure in figures.items()}
    load, copy = (statistics.median(values["first-load"][f"{name}-seconds"]) for name in ("load", "copy"))
    publish, taken = values["publish"], sorted(values["at-once"]["seconds"])
    first, again = ([publish[f"{way}-{run}-seconds"] for way in ("xet", "lfs")] for run in ("first", "again"))
    peak = {name: size / 1e6 for name, size in values["memory"]["peak-bytes"].items()}
    assert {name: figure["measured"] for name, figure in figures.items()} == {
        "first-load": f"{load * 1e3:.0f} ms; copy {copy * 1e3:.0f} ms",
        "publish": f"{first[0]:.1f} s by Xet, {first[1]:.1f} s by LFS; unchanged, "
        f"{again[0]:.2f} s and {again[1]:.2f} s",
        "at-once": f"p50 {statistics.median(taken):.2f} s, p99 {taken[62]:.2f} s, 0 failed",
        "memory": f"upload {peak['lfs-up']:.0f} MB by LFS, {peak['xet-up']:.0f} MB by Xet; "
        f"download {peak['down']:.0f} MB",
    }
    assert len(taken) == 64 and values["at-once"]["failed"] == []
    assert figures["memory"]["met"] is (max(peak.values()) <= 150)
