"""docs/kernels.md on the site: the table of targets, the figures of each kernel, and what they are measured of."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kernel_builder.measure.results import BenchmarkReport
from tests.support.places import ROOT

VARIANT = "torch-stable-abi210-cpu-x86_64-linux"
SOURCE = "scale/scale_cpu.cpp"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import kernel_page

    return kernel_page


def test_the_site_shows_every_row_of_the_results(script: ModuleType) -> None:
    """This test computes the figures from the JSON, without the code that writes the page."""
    page = script.fill((ROOT / "docs" / "kernels.md").read_text(), script.read_results())
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.h100.json")):
        if not (ROOT / "kernels" / path.name.partition(".")[0]).is_dir():
            continue
        kernel = path.name.partition(".")[0]
        section = page.partition(f"## {kernel}, H100\n")[2].partition("\n## ")[0]
        for row in json.loads(path.read_text())["rows"]:
            heading = f"**{row['operation']}, {row['passes']}, {row['dtype']}**"
            table = section.partition(heading)[2].partition("\n**")[0]
            line = next(
                line for line in table.splitlines() if line.startswith(f"| {'x'.join(map(str, row['shape']))} |")
            )
            assert f"({row['shares']['ours'][0]:.2f})" in line, (kernel, line)
            assert f"| {row['bytes'] / row['times']['ours'][0] / 1e9:.0f} |" in line, (kernel, line)


def test_the_page_has_a_place_for_its_tables(script: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"docs/kernels.md must have <!-- targets --> once"):
        script.fill("# Figures\n\n<!-- sections -->\n", [])


def test_every_result_has_a_plot(script: ModuleType, report: BenchmarkReport) -> None:
    result = script.Result("rmsnorm", "h100", report, report)
    page = script.section(result)
    assert f"![Share of copy speed]({script.plot_name(result)})" in page
    assert script.draw(result).startswith(b"<?xml") and script.draw(result) == script.draw(result)


def as_rms_norm(report: BenchmarkReport) -> BenchmarkReport:
    report.rows = report.rows[:2]
    for row in report.rows:
        row.point = row.point._replace(operation="rms_norm")
    return report


def test_targets_name_the_worst_shape(script: ModuleType, report: BenchmarkReport) -> None:
    results = [script.Result("rmsnorm", "h100", as_rms_norm(report), report)]
    measured = {(outcome.what, outcome.wanted): outcome for outcome in script.outcomes(results)}
    share = ("rms_norm, add_rms_norm above 16 MB: share of copy speed", "each at least 1.0")
    peer = ("rms_norm, add_rms_norm: best peer / ours", "each at least 0.98")
    assert measured[peer[0], "mean at least 1.03"].met
    assert measured[share].met and measured[share].measured == "1.040 at rms_norm 8x2048"

    row = report.rows[1]
    row.shares["ours"] = row.shares["ours"]._replace(median=0.9)
    row.ratios["eager"] = row.ratios["eager"]._replace(median=0.5)
    measured = {(outcome.what, outcome.wanted): outcome for outcome in script.outcomes(results)}
    assert not measured[share].met and measured[share].measured == "0.900 at rms_norm 8x128, 1 of 2 below"
    assert not measured[peer].met and measured[peer].measured.startswith("0.500 at rms_norm 8x128")

    row.times, row.faults = {}, {"ours": "its error is too large"}
    measured = {(outcome.what, outcome.wanted): outcome for outcome in script.outcomes(results)}
    assert not measured[share].met
    assert measured[share].measured == "1.040 at rms_norm 8x2048, 1 of 2 without a time"


def test_host_overhead_is_compared_with_the_yardstick(script: ModuleType, report: BenchmarkReport) -> None:
    results = [script.Result("rmsnorm", "h100", report, report)]
    (outcome,) = (outcome for outcome in script.outcomes(results) if outcome.what.startswith("host overhead"))
    assert outcome.met and outcome.measured == "0.40 at norm"
    report.hosts[0].times["ours"] = report.hosts[0].times["ours"]._replace(median=20e-6)
    (outcome,) = (outcome for outcome in script.outcomes(results) if outcome.what.startswith("host overhead"))
    assert not outcome.met and outcome.measured == "2.50 at norm, 1 of 1 above"


def test_the_later_measurement_of_host_overhead_counts(
    script: ModuleType, report: BenchmarkReport, tmp_path: Path
) -> None:
    report.save(tmp_path / "rmsnorm.h100.json")
    for date, later in (("2026-11-20T00:00:00+00:00", report.command), ("2026-11-22T00:00:00+00:00", "alone")):
        replace(report, date=date, command="alone").save(tmp_path / "rmsnorm.h100.host.json")
        (result,) = script.read_results(tmp_path)
        assert result.host_report.command == later
        replace(report, hosts=[]).save(tmp_path / "rmsnorm.h100.json")
        (result,) = script.read_results(tmp_path)
        assert result.host_report.command == "alone"
        report.save(tmp_path / "rmsnorm.h100.json")


def test_a_section_shows_the_command_the_commit_and_every_row(script: ModuleType, report: BenchmarkReport) -> None:
    text = script.section(script.Result("adaln", "h100", report, report))
    assert "a-kernel --json a.json" in text and "Commit `0123`" in text
    assert "| 8x2048 | 33.0 | 13.0 | 12.5 (1.04) | 1.03-1.05 | 2640 |" in text and "WRONG" in text
    assert "quack is absent" in text


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import measured_sources

    return measured_sources


@pytest.fixture
def project(tmp_path: Path) -> Path:
    copied = shutil.copytree(ROOT / "tests/projects/stable-scale", tmp_path / "repository/stable-scale")
    (copied / "CARD.md").write_text("# Scale\n")
    return copied


def recorded(project: Path) -> dict[str, Any]:
    """Return what a result of the project would record today."""

    def digest(name: str) -> str:
        return hashlib.sha256((project / name).read_bytes()).hexdigest()

    package = "torch-ext/stable_scale/__init__.py"
    provenance = {"kernel": {"commit": 40 * "a", "dirty": False}, "sources": {"files": {SOURCE: digest(SOURCE)}}}
    return {"provenance": provenance, "python": {"__init__.py": digest(package)}}


def edit(file: Path) -> None:
    file.write_text(file.read_text() + "\n")


def test_a_result_is_of_the_sources_that_it_records(sources: ModuleType, project: Path) -> None:
    build = recorded(project)
    unchanged = "Commit `aaaaaaaaaaaa`. The sources have not changed since."
    assert sources.described(project, VARIANT, build) == unchanged
    edit(project / "CARD.md")
    assert sources.described(project, VARIANT, build) == unchanged
    edit(project / SOURCE)
    edit(project / "torch-ext/stable_scale/__init__.py")
    assert sources.changes(project, VARIANT, build) == [SOURCE, "__init__.py"]
    build["provenance"]["sources"]["files"] = {"scale/gone.h": 64 * "0"}
    build["provenance"]["kernel"]["dirty"] = True
    del build["python"]
    assert sources.described(project, VARIANT, build) == (
        "Commit `aaaaaaaaaaaa`, with changes that were not committed. "
        "**The compiled sources have changed since**: scale/gone.h is gone."
    )


def test_without_digests_git_says_what_has_changed(sources: ModuleType, project: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
        command = ["git", *identity, "-C", str(project.parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    shared = project.parent / "kit"
    shared.mkdir()
    (shared / "rows.h").write_text("// rows\n")
    (project / "kit").symlink_to("../kit")
    (project.parent / "elsewhere.h").write_text("// not a source\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    build = {"provenance": {"kernel": {"commit": git("rev-parse", "HEAD").strip(), "dirty": False}}}
    edit(project.parent / "elsewhere.h")
    edit(project / "CARD.md")
    assert sources.changes(project, VARIANT, build) == []
    edit(project / SOURCE)
    edit(shared / "rows.h")
    assert sources.changes(project, VARIANT, build) == ["kit/rows.h", f"stable-scale/{SOURCE}"]


@pytest.mark.parametrize(
    ("build", "commit"),
    [
        ({"provenance": {"kernel": {"commit": 40 * "b", "dirty": False}}}, "Commit `bbbbbbbbbbbb`"),
        ({"provenance": None}, "No commit is recorded"),
    ],
)
def test_what_is_not_known_is_said(sources: ModuleType, project: Path, build: dict[str, Any], commit: str) -> None:
    unknown = "The sources are not recorded, so whether they have changed since is unknown."
    assert sources.described(project, VARIANT, build) == f"{commit}. {unknown}"
