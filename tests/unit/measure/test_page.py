"""docs/kernels.md: the table of targets, and the figures of each kernel."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType

import pytest

from kernel_builder.measure.results import BenchmarkReport
from tests.support.places import ROOT

SCRIPT = ROOT / "benchmarks" / "kernel_page.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_page", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_page"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_shows_every_row_of_the_results() -> None:
    """This test computes the figures from the JSON, without the code that writes the page."""
    page = (ROOT / "docs" / "kernels.md").read_text()
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.h100.json")):
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


def as_rms_norm(report: BenchmarkReport) -> BenchmarkReport:
    report.rows = report.rows[:2]
    for row in report.rows:
        row.point = row.point._replace(operation="rms_norm")
    return report


def test_targets_name_the_worst_shape(script: ModuleType, report: BenchmarkReport) -> None:
    reports = {"h100": {"rmsnorm": as_rms_norm(report)}}
    found = {(one.what, one.wanted): one for one in script.outcomes(reports)}
    share = ("rms_norm, add_rms_norm above 16 MB: share of copy speed", "each at least 1.0")
    peer = ("rms_norm, add_rms_norm: best peer / ours", "each at least 0.98")
    assert found[peer[0], "mean at least 1.03"].met
    assert found[share].met and found[share].measured == "1.040 at rms_norm 8x2048"

    row = report.rows[1]
    row.shares["ours"] = row.shares["ours"]._replace(median=0.9)
    row.ratios["eager"] = row.ratios["eager"]._replace(median=0.5)
    found = {(one.what, one.wanted): one for one in script.outcomes(reports)}
    assert not found[share].met and found[share].measured == "0.900 at rms_norm 8x128, 1 of 2 below"
    assert not found[peer].met and found[peer].measured.startswith("0.500 at rms_norm 8x128")

    row.times, row.faults = {}, {"ours": "its error is too large"}
    found = {(one.what, one.wanted): one for one in script.outcomes(reports)}
    assert not found[share].met and found[share].measured == "1.040 at rms_norm 8x2048, 1 of 2 without a time"


def test_host_overhead_is_compared_with_the_yardstick(script: ModuleType, report: BenchmarkReport) -> None:
    reports = {"h100": {"rmsnorm": report}}
    (found,) = (one for one in script.outcomes(reports) if one.what.startswith("host overhead"))
    assert found.met and found.measured == "0.40 at norm"
    report.hosts[0].times["ours"] = report.hosts[0].times["ours"]._replace(median=20e-6)
    (found,) = (one for one in script.outcomes(reports) if one.what.startswith("host overhead"))
    assert not found.met and found.measured == "2.50 at norm, 1 of 1 above"


def test_a_section_shows_the_command_the_commit_and_every_row(script: ModuleType, report: BenchmarkReport) -> None:
    text = script.page({"h100": {"adaln": report}})
    assert "a-kernel --json a.json" in text and "commit 0123" in text
    assert "| 8x2048 | 33.0 | 13.0 | 12.5 (1.04) | 1.03-1.05 | 2640 |" in text and "WRONG" in text
    assert "quack is absent" in text
