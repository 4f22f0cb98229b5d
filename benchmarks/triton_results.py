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


def rows(report: Mapping[str, Any]) -> list[Row]:
    """Return the figures of the measured ops that have a target; the worst op counts."""
    ops = list(report["operations"].values())
    first = max(result["first"][AHEAD]["first-ms"] / result["first"][JIT]["first-ms"] for result in ops)
    host, device = (max(ratio(result[kind]) for result in ops) for kind in ("host-us", "device-us"))
    same, compared = (sum(counts) for counts in zip(*map(equal, ops), strict=True))
    imported = any(result["first"][AHEAD]["triton-imported"] for result in ops)
    return [
        Row("first call / just in time with an empty cache", "at most 0.01", f"{first:.4f}", first <= 0.01),
        Row("host time of a call / with Triton's launcher", "at most 0.5", f"{host:.2f}", host <= 0.5),
        Row("device time / just in time", "at most 1.01", f"{device:.3f}", device <= 1.01),
        Row("results bit-identical to just in time", "all", f"{same} of {compared}", same == compared),
        Row("packages needed at run time besides Torch", "nothing", "Triton" if imported else "nothing", not imported),
    ]


def public_rows(report: Mapping[str, Any]) -> list[Row]:
    """Return the figures of public kernels."""
    kernels = list(report["kernels"].values())
    built = f"{sum(kernel['built'] for kernel in kernels)} of {len(kernels)}"
    same, compared = (sum(counts) for counts in zip(*map(equal, kernels), strict=True))
    title = "public kernels that build with a declaration and a launch function added"
    ran = all(kernel["results"] for kernel in kernels)
    return [
        Row(title, "6 of 6", built, built == "6 of 6"),
        Row(
            "results of the public kernels equal to just in time",
            "all",
            f"{same} of {compared}",
            ran and same == compared,
        ),
    ]
