"""Benchmark reports: saved, read back, and shown as tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.measure import tables
from kernel_builder.measure.results import (
    COPY,
    OURS,
    YARDSTICK,
    BenchmarkReport,
    Deviation,
    Estimate,
    HostOverhead,
    Point,
    Row,
)
from kernel_format.errors import ConfigError
from tests.support.places import ROOT


def around(value: float) -> Estimate:
    return Estimate(value, 0.99 * value, 1.01 * value)


@pytest.fixture
def report() -> BenchmarkReport:
    """A report of two operations: one complete row, one with a failed peer, one with a wrong kernel."""
    rows = []
    for operation, shape in (("norm", (8, 2048)), ("norm", (8, 128)), ("turn & <twist>", (1, 2, 3))):
        row = Row(Point(operation, "forward", shape, "bfloat16"), bytes=33_000_000, sets=7)
        row.errors = {name: [Deviation(1.5e-3, 0.45)] for name in (OURS, "eager", "liger")}
        times = {COPY: 13e-6, OURS: 12.5e-6, "eager": 130e-6, "liger": 13.5e-6}
        if shape == (8, 128):
            row.faults = {"liger": "RuntimeError: no such shape"}
            del times["liger"]
        if operation != "norm":
            row.faults = {OURS: "its error is 0.1 of its size, that of eager 0.0015"}
            times = {}
        row.methods = dict.fromkeys(times, "graph") | ({"eager": "events"} if times else {})
        row.times = {name: around(time) for name, time in times.items()}
        row.shares = {name: around(times[COPY] / time) for name, time in times.items()}
        row.ratios = {name: around(time / times[OURS]) for name, time in times.items()}
        rows.append(row)
    host = HostOverhead(
        Point("norm", "forward", (1, 8), "bfloat16"),
        {OURS: around(3.2e-6), YARDSTICK: around(8e-6), "eager": around(60e-6)},
    )
    return BenchmarkReport(
        kernel="a-kernel",
        variant="torch-stable-abi210-cu130-x86_64-linux",
        build={"id": "_a_kernel_cuda_abc", "commit": "0123", "bytes": 400_000},
        device="cuda",
        command="kernel-builder benchmark a-kernel --json a.json",
        date="2026-11-21T15:00:00+00:00",
        machine={
            "cpu": "a processor",
            "gpu": "NVIDIA H100",
            "driver": "580.1",
            "cuda": "13.0",
            "system": "Linux",
            "python": "3.12.1",
            "packages": {"torch": "2.11.0"},
        },
        rounds=21,
        absent={"quack": "ModuleNotFoundError: No module named 'quack'"},
        rows=rows,
        hosts=[host],
    )


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
