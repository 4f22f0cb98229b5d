"""Benchmark reports: saved, read back, and shown without the time of a wrong result."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.measure import tables
from kernel_builder.measure.results import OURS, BenchmarkReport
from kernel_format.errors import ConfigError
from tests.support.places import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def test_a_report_is_read_as_it_was_saved(tmp_path: Path) -> None:
    earlier = RESULTS / "rmsnorm.cpu.json"
    BenchmarkReport.read(earlier).save(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_bytes() == earlier.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [], "hosts": []}', '{"rows": [{}], "hosts": []}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a result of `kernel-builder benchmark --json`"):
        BenchmarkReport.read(tmp_path / "a.json")


def test_a_failed_peer_and_a_wrong_result_have_no_time() -> None:
    report = BenchmarkReport.read(RESULTS / "rmsnorm.h200.json")
    _, failed, wrong = rows = report.rows[:3]
    peer = next(name for name in failed.times if name not in (OURS, "copy", "eager"))
    failed.faults[peer] = "RuntimeError: no such shape"
    del failed.times[peer]
    wrong.faults, wrong.times, wrong.shares, wrong.ratios = {OURS: "its error is 0.1"}, {}, {}, {}
    assert report.wrong() == [wrong]
    table = tables.times(rows)
    column = table[0].index
    assert table[2][column(peer)] == "failed"
    assert table[2][column(OURS)].endswith(f" ({failed.shares[OURS].median:.2f})")
    assert table[3][column(OURS)] == "WRONG" and table[3][-1] == "-"
    notes = tables.notes(report)
    assert f"{failed.point}: {peer}: RuntimeError: no such shape" in notes
    assert f"{wrong.point}: {OURS}: its error is 0.1" in notes
