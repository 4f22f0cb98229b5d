"""The figures of Triton kernels that are compiled ahead of time as rows of tables, with their targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from builder_results import Row

AHEAD, JIT = "ahead of time", "just in time"
HEAD = ("op", "first call, ms", AHEAD, "host, us", AHEAD, "device, us", AHEAD, "ratio", "equal bits", "error")


def ratio(samples: Mapping[str, Any]) -> float:
    """Return the median of the rounds' ratios, ahead of time to just in time."""
    return statistics.median(a / b for a, b in zip(samples[AHEAD], samples[JIT], strict=True))


def equal(result: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of sizes whose results are equal bit by bit, and the number of sizes."""
    return sum(row["equal"] for row in result["results"]), len(result["results"])


def cells(ops: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the cells of each op, in the order of `HEAD`."""
    for name, result in ops.items():
        first = [f"{result['first'][how]['first-ms']:.2f}" for how in (JIT, AHEAD)] if "first" in result else ["-"] * 2
        times = [
            f"{statistics.median(result[kind][how]):.1f}" for kind in ("host-us", "device-us") for how in (JIT, AHEAD)
        ]
        error = max(row.get("error", 0.0) for row in result["results"])
        compared = "{} of {}".format(*equal(result))
        yield [name, *first, *times, f"{ratio(result['device-us']):.3f}", compared, f"{error:.1e}"]


def rows(report: Mapping[str, Any] | None, build: Mapping[str, Any] | None) -> list[Row]:
    """Return the figures with a target: of the measured ops (None: not measured), and of the build of all kernels."""
    ops = list(report["operations"].values()) if report else []
    firsts = [result["first"][AHEAD]["first-ms"] / result["first"][JIT]["first-ms"] for result in ops]
    hosts, devices = ([ratio(result[kind]) for result in ops] for kind in ("host-us", "device-us"))
    found = [equal(result) for result in ops]
    same, compared = sum(pair[0] for pair in found), sum(pair[1] for pair in found)
    imported = any(result["first"][AHEAD]["triton-imported"] for result in ops)
    figures = [
        ("first call, ahead of time / just in time with an empty cache", "at most 0.01", firsts, 0.01, "{:.4f}"),
        ("host time of a call / with Triton's launcher", "at most 0.5", hosts, 0.5, "{:.2f}"),
        ("device time / just in time", "at most 1.01", devices, 1.01, "{:.3f}"),
    ]
    table = [
        Row(title, target, form.format(max(values)) if values else "-", max(values) <= limit if values else None)
        for title, target, values, limit, form in figures
    ]
    table.append(Row("results equal bit by bit", "all", f"{same} of {compared}", same == compared if ops else None))
    needed = ("Triton" if imported else "nothing") if ops else "-"
    table.append(Row("needed at run time beyond Torch", "nothing", needed, not imported if ops else None))
    seconds = build["seconds"] if build else None
    title = "build of six kernels for {} capabilities on {} cores".format(
        *(build["capabilities"], build["cores"]) if build else ("five", "two")
    )
    table.append(
        Row(title, "at most 120 s", f"{seconds:.0f} s" if seconds else "-", seconds <= 120 if seconds else None)
    )
    return table
