"""docs/kernels.md and its pictures are what the results give."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

from kernel_builder.measure.results import Report
from tests.conftest import ROOT

SCRIPT = ROOT / "benchmarks" / "kernel_page.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_page", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_page"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_results_give() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), f"run benchmarks/kernel_page.py; not as it must be: {done.stdout}"


def test_targets_name_the_worst_shape(script: ModuleType, report: Report) -> None:
    report.rows = report.rows[:2]
    for row in report.rows:
        row.place = row.place._replace(operation="rms_norm")
    found = {one.what: one for one in script.targets({"h100": {"rmsnorm": report}})}
    assert found["the same, geometric mean"].met
    floor = found["the same: share of a copy above 16 MB"]
    assert floor.met and floor.measured == "1.040 at rms_norm 8x2048"
    row = report.rows[1]
    row.shares["ours"] = row.shares["ours"]._replace(median=0.9)
    row.ratios["eager"] = row.ratios["eager"]._replace(median=0.5)
    found = {one.what: one for one in script.targets({"h100": {"rmsnorm": report}})}
    floor = found["the same: share of a copy above 16 MB"]
    assert not floor.met and floor.measured == "0.900 at rms_norm 8x128, 1 of 2 below"
    best = found["rms_norm, add_rms_norm: best peer / ours, each shape"]
    assert not best.met and best.measured.startswith("0.500 at rms_norm 8x128")
    row.times, row.faults = {}, {"ours": "its error is too large"}
    found = {one.what: one for one in script.targets({"h100": {"rmsnorm": report}})}
    floor = found["the same: share of a copy above 16 MB"]
    assert not floor.met and floor.measured == "1.040 at rms_norm 8x2048, 1 of 2 without a time"
    host = found["cost for the host, forward"]
    assert host.met and host.measured == "3.2 us, of norm"


def test_the_page_has_all_that_was_measured(script: ModuleType, report: Report) -> None:
    text = script.page({"h100": {"adaln": report}})
    assert "a-kernel --json a.json" in text and "Built from 0123" in text
    assert "| 8x2048 | 33.0 | 13.0 | 12.5 (1.04) | 1.03-1.05 | 2640 |" in text and "WRONG" in text
    assert "quack is absent" in text
