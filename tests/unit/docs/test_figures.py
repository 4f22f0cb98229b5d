"""The figures of README.md and docs/ are those of benchmarks/results, and verdicts follow from the values."""

from __future__ import annotations

import json
import runpy
from types import ModuleType
from typing import Any

import pytest

from kernel_builder.measure.results import BenchmarkReport
from tests.support.places import ROOT


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def pages(benchmarks: None) -> ModuleType:
    import pages

    return pages


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/compatibility.md",
        "docs/figures.md",
        "docs/kernels.md",
        "docs/models.md",
        "docs/skills.md",
    ],
)
def test_pages_have_the_figures_of_the_results(pages: ModuleType, page: str) -> None:
    text = (ROOT / page).read_text()
    assert pages.filled(page, text) == text, "run benchmarks/pages.py"


def test_only_blocks_are_written(pages: ModuleType) -> None:
    blocks = [f"<!-- figures: {name} -->\nstale 0.99\n<!-- /figures -->\n" for name in ("builder", "commands")]
    filled = pages.filled("docs/figures.md", "before\n" + "kept 0.99\n".join(blocks) + "after\n")
    assert filled.startswith("before\n") and filled.endswith("<!-- /figures -->\nafter\n")
    assert filled.count("kept 0.99\n") == 1 and "stale" not in filled
    assert pages.filled("docs/figures.md", filled) == filled
    with pytest.raises(
        ValueError, match=r"docs/figures.md has the blocks of figures \['builder'\], expected \['builder"
    ):
        pages.filled("docs/figures.md", blocks[0])


# --- models ----------------------------------------------------------------------------------------------------------


def test_eager_counts_among_the_peers_of_a_compiled_case(benchmarks: None) -> None:
    import model_results

    times = {
        "compile is slower": {"eager": 4.0, "compile": 5.0, "reduce-overhead": 6.0, "graphs": 3.0},
        "compile is faster": {"eager": 4.0, "compile": 2.0, "graphs": 1.0},
        "not compiled": {"eager": 4.0, "graphs": 1.0},
    }
    report = {"time": {case: {"milliseconds": milliseconds} for case, milliseconds in times.items()}}
    assert model_results.beside_the_fastest(report) == {"compile is slower": 0.75, "compile is faster": 0.5}


def test_models_are_measured_with_releases_that_the_page_names(pages: ModuleType) -> None:
    """They may be older than the oldest that the card names, and not newer than the newest."""
    tested = runpy.run_path(str(ROOT / "kernels/blocks/torch-ext/blocks/tested_versions.py"))["TESTED"]
    page = (ROOT / "docs/models.md").read_text()
    for report in (pages.results("models-h200"), pages.results("generate.h200")):
        assert f"transformers {report['machine']['transformers']};" in page
        for library in tested.keys() & report["machine"].keys():
            release, newest = report["machine"][library].rpartition(".")[0], tested[library][1]
            assert [*map(int, release.split("."))] <= [*map(int, newest.split("."))], library


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel_results(benchmarks: None) -> ModuleType:
    import kernel_results

    return kernel_results


def test_the_site_has_every_row_of_the_results(pages: ModuleType) -> None:
    """This test computes the figures from the JSON, without the code that writes the page."""
    page = pages.render("docs/kernels.md")[pages.SITE]
    for path in sorted((ROOT / "benchmarks/results").glob("*.h100.json")):
        section = page.partition(f"## {path.name.partition('.')[0]}, H100\n")[2].partition("\n## ")[0]
        for row in json.loads(path.read_text())["rows"]:
            heading = f"**{row['operation']}, {row['passes']}, {row['dtype']}**"
            table = section.partition(heading)[2].partition("\n**")[0]
            shape = "x".join(map(str, row["shape"]))
            (line,) = (line for line in table.splitlines() if line.startswith(f"| {shape} |"))
            assert f"({row['shares']['ours'][0]:.2f})" in line, (path.name, line)
            assert f"| {row['bytes'] / row['times']['ours'][0] / 1e9:.0f} |" in line, (path.name, line)


def test_targets_name_the_worst_shape(kernel_results: ModuleType, report: BenchmarkReport) -> None:
    report.rows = report.rows[:2]
    for row in report.rows:
        row.point = row.point._replace(operation="rms_norm")
    share = ("rms_norm, add_rms_norm above 16 MB: share of copy speed", "each at least 1.0")
    peer = ("rms_norm, add_rms_norm: best peer / ours", "each at least 0.98")

    def measured() -> dict[tuple[str, str], Any]:
        results = [kernel_results.Result("rmsnorm", "h100", report)]
        return {(outcome.title, outcome.target): outcome for outcome in kernel_results.outcomes(results)}

    assert measured()[peer[0], "mean at least 1.03"].met
    assert measured()[share].met and measured()[share].measured == "1.040 at rms_norm 8x2048"

    row = report.rows[1]
    row.shares["ours"] = row.shares["ours"]._replace(median=0.9)
    row.ratios["eager"] = row.ratios["eager"]._replace(median=0.5)
    assert not measured()[share].met and measured()[share].measured == "0.900 at rms_norm 8x128, 1 of 2 below"
    assert not measured()[peer].met and measured()[peer].measured.startswith("0.500 at rms_norm 8x128")

    row.times, row.faults = {}, {"ours": "its error is too large"}
    assert not measured()[share].met
    assert measured()[share].measured == "1.040 at rms_norm 8x2048, 1 of 2 without a time"


def test_host_overhead_is_compared_with_the_yardstick(kernel_results: ModuleType, report: BenchmarkReport) -> None:
    def measured() -> Any:
        outcomes = kernel_results.outcomes([kernel_results.Result("rmsnorm", "h100", report)])
        return next(outcome for outcome in outcomes if outcome.title.startswith("host overhead"))

    assert measured().met and measured().measured == "0.40 at norm"
    report.hosts[0].times["ours"] = report.hosts[0].times["ours"]._replace(median=20e-6)
    assert not measured().met and measured().measured == "2.50 at norm, 1 of 1 above"
