"""The figures of README.md and docs/ are those of benchmarks/results, and verdicts follow from the values."""

from __future__ import annotations

import json
import re
from types import ModuleType

import pytest

from tests.support.places import ROOT


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import pages

    return pages


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/compatibility.md", "docs/figures.md", "docs/kernels.md", "docs/models.md", "docs/skills.md"],
)
def test_pages_have_the_figures_of_the_results(pages: ModuleType, page: str) -> None:
    text = (ROOT / page).read_text()
    assert pages.filled(page, text) == text, "run benchmarks/pages.py"


# --- models ----------------------------------------------------------------------------------------------------------


def test_models_are_measured_with_releases_that_the_page_names(pages: ModuleType) -> None:
    """They may be older than the oldest that the card names, and not newer than the newest."""
    card = (ROOT / "kernels/blocks/CARD.md").read_text()
    tested = dict(re.findall(r"^\| (diffusers|transformers) \| .*?(\d+\.\d+)\.\d+ \|$", card, re.MULTILINE))
    page = (ROOT / "docs/models.md").read_text()
    for report in (pages.results("models-h200"), pages.results("generate.h200")):
        assert f"transformers {report['machine']['transformers']};" in page
        for library in tested.keys() & report["machine"].keys():
            release, newest = report["machine"][library].rpartition(".")[0], tested[library]
            assert [*map(int, release.split("."))] <= [*map(int, newest.split("."))], library


# --- kernels ---------------------------------------------------------------------------------------------------------


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
