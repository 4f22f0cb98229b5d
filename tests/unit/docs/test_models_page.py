"""docs/models.md is what benchmarks/models_page.py writes from the results; the site adds the plot and the commits."""

from __future__ import annotations

import runpy
from types import ModuleType

import pytest

from tests.support.places import ROOT


@pytest.fixture
def models_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import models_page

    return models_page


def test_the_page_is_written_from_the_results(models_page: ModuleType) -> None:
    assert models_page.main_page(models_page.read_results()) == (ROOT / "docs/models.md").read_text()


def test_the_site_adds_the_plot_and_what_was_measured(models_page: ModuleType) -> None:
    page, report = (ROOT / "docs/models.md").read_text(), models_page.read_results()
    text = models_page.fill(page, {**report, "packages": {}})
    assert f"]({models_page.PLOT})" in text and "do not record the commit of the kernels" in text
    package = {"variant": "torch-stable-abi210-cu130-x86_64-linux", "provenance": {"kernel": {"commit": 40 * "c"}}}
    text = models_page.fill(page, {**report, "packages": {"rmsnorm": package}})
    assert "- rmsnorm: Commit `cccccccccccc`. The sources are not recorded" in text
    with pytest.raises(ValueError, match=r"docs/models.md must have <!-- plot --> once"):
        models_page.fill("# Models\n", report)
    assert models_page.draw_svg(report).startswith(b"<?xml")


def test_eager_counts_among_the_peers_of_a_case_that_was_compiled(models_page: ModuleType) -> None:
    times = {
        "compile is slower": {"eager": 4.0, "compile": 5.0, "reduce-overhead": 6.0, "graphs": 3.0},
        "compile is faster": {"eager": 4.0, "compile": 2.0, "graphs": 1.0},
        "not compiled": {"eager": 4.0, "graphs": 1.0},
    }
    report = {"time": {case: {"milliseconds": milliseconds} for case, milliseconds in times.items()}}
    assert models_page.beside_the_fastest(report) == {"compile is slower": 0.75, "compile is faster": 0.5}


def test_the_models_are_measured_with_releases_that_the_card_names(models_page: ModuleType) -> None:
    tested = runpy.run_path(str(ROOT / "kernels/blocks/torch-ext/blocks/tested_versions.py"))["TESTED"]
    for report in (models_page.read_results(), models_page.generate_page.read_results()):
        for library in tested.keys() & report["machine"].keys():
            assert report["machine"][library].rpartition(".")[0] in tested[library], library
