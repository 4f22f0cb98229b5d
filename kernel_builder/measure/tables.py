"""Benchmark reports as tables, for a terminal and for the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby

from kernel_builder.measure.results import COPY, OURS, YARDSTICK, BenchmarkReport, HostOverhead, Row, shape_name

Table = list[list[str]]


def groups(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Group adjacent rows by operation, pass and dtype; return each group with its heading."""
    named = groupby(rows, key=lambda row: (row.point.operation, row.point.passes, row.point.dtype))
    return [(", ".join(key), list(members)) for key, members in named]


def implementations(rows: Iterable[Row]) -> list[str]:
    """Return the implementations that have a time or a fault in any row: the kernel first, without the copy."""
    names = dict.fromkeys(name for row in rows for name in (*row.times, *row.faults))
    return [OURS, *(name for name in names if name not in (OURS, COPY))] if names else []


def times(rows: Sequence[Row]) -> Table:
    """Return microseconds of a call at each shape, with the share of copy speed in brackets.

    For the kernel there are also the 95 % interval of that share, and the gigabytes that it moves per second.
    """
    names = implementations(rows)
    table = [["shape", "MB", COPY, *names[:1], "95%", "GB/s", *names[1:], "best peer / ours"]]
    for row in rows:
        cells = [shape_name(row.point.shape), _figures(row.bytes / 1e6) if row.bytes else "-"]
        cells.append(_figures(row.times[COPY].median * 1e6) if COPY in row.times else "-")
        for name in names:
            if name in row.times:
                share = row.shares[name]
                cells.append(f"{_figures(row.times[name].median * 1e6)} ({share.median:.2f})")
            else:
                cells.append("WRONG" if name == OURS else "failed" if name in row.faults else "-")
            if name == OURS:
                known = name in row.times
                cells.append(f"{share.low:.2f}-{share.high:.2f}" if known else "-")
                cells.append(f"{row.bytes / row.times[name].median / 1e9:.0f}" if known else "-")
        best = row.best_peer()
        table.append([*cells, f"{best[1].median:.2f} ({best[0]})" if best else "-"])
    return table


def hosts(measured: Sequence[HostOverhead]) -> Table:
    """Return the host overhead of each operation and implementation in microseconds, and the kernel's / `YARDSTICK`."""
    names = list(dict.fromkeys(name for host in measured for name in host.times))
    table = [["operation", "pass", *names, f"ours / {YARDSTICK}"]]
    for host in measured:
        cells = [f"{host.times[name].median * 1e6:.1f}" if name in host.times else "-" for name in names]
        relative = host.relative(YARDSTICK)
        table.append([host.point.operation, host.point.passes, *cells, "-" if relative is None else f"{relative:.2f}"])
    return table


def summary(rows: Iterable[Row]) -> Table:
    """Return, for each operation and pass, the share of copy speed and the best peer's time divided by the kernel's."""
    table = [
        ["operation", "share of copy speed, mean", "least", "best peer / ours, mean", "least", "eager / ours, mean"]
    ]
    for heading, members in groups(rows):
        shares = [row.shares[OURS].median for row in members if OURS in row.shares]
        best = [peer[1].median for row in members if (peer := row.best_peer())]
        eager = [row.ratios["eager"].median for row in members if "eager" in row.ratios]
        table.append([heading, *_mean_and_least(shares), *_mean_and_least(best), _mean_and_least(eager)[0]])
    return table


def notes(report: BenchmarkReport) -> list[str]:
    """Return notes on absent peers, wrong results, other timing methods, and the spread of samples."""
    lines = [f"{name} is absent: {reason}" for name, reason in report.absent.items()]
    for row in report.rows:
        lines += [f"{row.point}: {name}: {reason}" for name, reason in row.faults.items()]
        other = {name for name, method in row.methods.items() if method != row.methods[COPY]}
        lines += [f"{row.point}: {name} was timed by {row.methods[name]}" for name in sorted(other)]
    lines += [f"{host.point}: {name}: {reason}" for host in report.hosts for name, reason in host.faults.items()]
    widths = [time.spread for row in report.rows for time in row.times.values()]
    if widths:
        widths.sort()
        lines.append(
            f"95% intervals of times: half are within {widths[len(widths) // 2]:.1%}, all within {widths[-1]:.1%}"
        )
    return lines


def machine(report: BenchmarkReport) -> str:
    """Return the GPU or CPU, the driver, package versions and the date, as one line."""
    on = report.machine
    with_driver = [f"driver {on['driver']}"] if on.get("driver") else []
    packages = [f"{name} {version}" for name, version in on["packages"].items()]
    return ", ".join([device(report), *with_driver, *packages, f"Python {on['python']}", report.date[:10]])


def device(report: BenchmarkReport) -> str:
    """Return the name of the GPU, or of the CPU with its number of threads."""
    return str(report.machine.get("gpu") or f"{report.machine['cpu']}, {report.machine['threads']} threads")


def _figures(value: float) -> str:
    """Format with three significant digits; whole numbers in full."""
    return f"{value:.3g}" if value < 1 else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _mean_and_least(values: Sequence[float]) -> list[str]:
    return [f"{statistics.geometric_mean(values):.2f}", f"{min(values):.2f}"] if values else ["-", "-"]
