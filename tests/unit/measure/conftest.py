"""The fixture `report`: a benchmark report with complete, failed and wrong results."""

from __future__ import annotations

import pytest

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
