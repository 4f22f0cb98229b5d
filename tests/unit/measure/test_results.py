"""Benchmark reports: saved, read back, and shown as tables and plots."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.measure import tables
from kernel_builder.measure.results import OURS, BenchmarkReport
from kernel_format.errors import ConfigError
from tests.support.places import ROOT


def test_a_report_is_read_as_it_was_saved(report: BenchmarkReport, tmp_path: Path) -> None:
    report.save(tmp_path / "a.json")
    again = BenchmarkReport.read(tmp_path / "a.json")
    assert again.rows[0].point == report.rows[0].point
    assert again.rows[0].errors == report.rows[0].errors
    assert again.wrong() == [again.rows[2]]
    assert again.hosts[0].times[OURS].median == pytest.approx(3.2e-6)
    assert again.rows[0].times == {name: pytest.approx(time, rel=1e-3) for name, time in report.rows[0].times.items()}
    for earlier in (tmp_path / "a.json", ROOT / "benchmarks" / "results" / "rmsnorm.cpu.json"):
        BenchmarkReport.read(earlier).save(tmp_path / "b.json")
        assert (tmp_path / "b.json").read_bytes() == earlier.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "b.json"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [], "hosts": []}', '{"rows": [{}], "hosts": []}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a result of `kernel-builder benchmark --json`"):
        BenchmarkReport.read(tmp_path / "a.json")


def test_a_wrong_result_has_no_time_in_the_table(report: BenchmarkReport) -> None:
    table = tables.times(report.rows)
    assert table[0] == ["shape", "MB", "copy", "ours", "95%", "GB/s", "eager", "liger", "best peer / ours"]
    ours = ["12.5 (1.04)", "1.03-1.05", "2640"]
    assert table[1] == ["8x2048", "33.0", "13.0", *ours, "130 (0.10)", "13.5 (0.96)", "1.08 (liger)"]
    assert table[2] == ["8x128", "33.0", "13.0", *ours, "130 (0.10)", "failed", "10.40 (eager)"]
    assert table[3] == ["1x2x3", "33.0", "-", "WRONG", "-", "-", "-", "-", "-"]


def test_summaries_have_geometric_means_and_host_overhead_beside_rms_norm(report: BenchmarkReport) -> None:
    assert tables.summary(report.rows)[1:] == [
        ["norm, forward, bfloat16", "1.04", "1.04", "3.35", "1.08", "10.40"],
        ["turn & <twist>, forward, bfloat16", "-", "-", "-", "-", "-"],
    ]
    assert tables.hosts(report.hosts) == [
        ["operation", "pass", "ours", "F.rms_norm", "eager", "ours / F.rms_norm"],
        ["norm", "forward", "3.2", "8.0", "60.0", "0.40"],
    ]


def test_notes_name_absent_peers_and_faults(report: BenchmarkReport) -> None:
    assert tables.notes(report) == [
        "quack is absent: ModuleNotFoundError: No module named 'quack'",
        "norm, forward, bfloat16, 8x2048: eager was timed by events",
        "norm, forward, bfloat16, 8x128: liger: RuntimeError: no such shape",
        "norm, forward, bfloat16, 8x128: eager was timed by events",
        "turn & <twist>, forward, bfloat16, 1x2x3: ours: its error is 0.1 of its size, that of eager 0.0015",
        "95% intervals of times: half are within 1.0%, all within 1.0%",
    ]


def test_tables_as_markdown() -> None:
    table = [["shape", "us"], ["8x2048", "1.0"], ["8", "123.0"]]
    assert tables.as_markdown(table) == "| shape | us |\n| --- | --- |\n| 8x2048 | 1.0 |\n| 8 | 123.0 |"
