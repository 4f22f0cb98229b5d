"""The results of `kernel-builder benchmark --json`, benchmarks/results/<kernel>.<machine>.json, for docs/kernels.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from builder_results import Row as TargetRow
from model_results import draw_bars
from recording import RESULTS, ROOT

from kernel_builder import toml_file
from kernel_builder.measure import tables
from kernel_builder.measure.results import (
    OURS,
    YARDSTICK,
    BenchmarkReport,
    HostOverhead,
    Row,
    shape_name,
)


@dataclass(frozen=True)
class Result:
    """The report of one kernel on one machine."""

    kernel: str
    machine: str
    report: BenchmarkReport

    @property
    def plot_name(self) -> str:
        """Return the path of the plot, relative to the page."""
        return f"kernels/{self.kernel}.{self.machine}.svg"

    def draw(self) -> bytes:
        """Return the plot as an SVG file."""
        rows = [row for row in self.report.rows if OURS in row.shares]
        names = [name for name in tables.implementations(rows) if any(name in row.shares for row in rows)]
        shares = {
            str(row.point): {name: row.shares[name].median if name in row.shares else None for name in names[::-1]}
            for row in rows
        }
        title = f"{self.kernel}, {tables.device(self.report)}, {self.report.date[:10]}"
        return draw_bars(shares, title, "share of copy speed")


def as_markdown(table: tables.Table) -> str:
    """Format a table as Markdown."""
    head, *others = (f"| {' | '.join(cells)} |" for cells in table)
    rule = f"|{' --- |' * len(table[0])}"
    return "\n".join([head, rule, *others])


def read_results() -> list[Result]:
    """Read the results of all kernels, GPUs before the CPU."""
    names = [path.name.split(".") for path in RESULTS.glob("*.*.json")]
    return [
        Result(kernel, machine, BenchmarkReport.read(RESULTS / f"{kernel}.{machine}.json"))
        for kernel, machine, _ in sorted(names, key=lambda name: (name[1] == "cpu", name[1], name[0]))
        if (ROOT / "kernels" / kernel / "build.toml").exists()
    ]


def read_toml(name: str) -> dict[str, Any]:
    """Read a TOML file of benchmarks/."""
    return toml_file.read(ROOT / "benchmarks" / name)


def untuned_shapes() -> set[tuple[int, ...]]:
    """Return the declared shapes that the kernels are not tuned for."""
    return {tuple(shape) for shape in read_toml("kernel_targets.toml")["untuned-shapes"]}


def is_untuned(row: Row, untuned: set[tuple[int, ...]]) -> bool:
    """Return whether a row's shape is one that the kernels are not tuned for; a single row of a tensor is one, too."""
    return row.point.shape in untuned or all(size == 1 for size in row.point.shape[:2])


def outcomes(results: Sequence[Result]) -> Iterator[TargetRow]:
    """Evaluate every target for which there are results."""
    targets = read_toml("kernel_targets.toml")
    untuned = {tuple(shape) for shape in targets["untuned-shapes"]}
    for target in targets["target"]:
        measured = [result.report for result in results if result.machine == target["machine"]]
        if target["value"] == "host":
            hosts = [host for report in measured for host in report.hosts if host.point.passes == target["passes"]]
            yield from _host_outcome(target, hosts)
        else:
            yield from _outcome(target, [row for r in measured for row in r.rows if _counts(row, target, untuned)])


def _counts(row: Row, target: Mapping[str, Any], untuned: set[tuple[int, ...]]) -> bool:
    """Return whether a row counts for a target. A row without a time counts at any size: it misses the target."""
    point = row.point
    return (
        point.operation in target.get("operations", [point.operation])
        and point.passes == target.get("passes", point.passes)
        and list(point.shape) in target.get("shapes", [list(point.shape)])
        and (target.get("all-shapes", False) or is_untuned(row, untuned) == target.get("untuned", False))
        and (not row.times or row.bytes > target.get("above-megabytes", 0) * 1e6)
    )


def _value(kind: str) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        if kind == "share":
            return row.shares[OURS].median
        if kind == "best-peer":
            peer = row.best_peer()
            return peer[1].median if peer else None
        return row.ratios[kind].median if kind in row.ratios else None

    return value


def _outcome(target: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[TargetRow]:
    value_of = _value(target["value"])
    measured = {number: value for number, row in enumerate(rows) if OURS in row.times and (value := value_of(row))}
    untimed = sum(OURS in row.faults for row in rows)
    lacking = f", {untimed} of {untimed + len(measured)} without a time" if untimed else ""
    if "mean" in target:
        wanted = f"mean at least {target['mean']}"
        mean = statistics.geometric_mean(measured.values()) if measured else 0.0
        text, met = f"{mean:.3f}", mean >= target["mean"]
    else:
        wanted = f"each at least {target['each']}"
        least = min(measured, key=lambda number: measured[number], default=None)
        missed = sum(value < target["each"] for value in measured.values())
        point = rows[least].point if least is not None else None
        text = f"{measured[least]:.3f} at {point.operation} {shape_name(point.shape)}" if point else "nothing"
        text += f", {missed} of {len(measured)} below" if missed else ""
        met = not missed
    if measured or untimed:
        yield TargetRow(target["title"], wanted, text + lacking, met and not untimed)


def _host_outcome(target: Mapping[str, Any], hosts: Sequence[HostOverhead]) -> Iterator[TargetRow]:
    measured = {host.point.operation: ratio for host in hosts if (ratio := host.relative(YARDSTICK))}
    if not measured:
        return
    worst = max(measured, key=lambda name: measured[name])
    missed = sum(ratio > target["at-most"] for ratio in measured.values())
    text = f"{measured[worst]:.2f} at {worst}" + (f", {missed} of {len(measured)} above" if missed else "")
    yield TargetRow(target["title"], f"each at most {target['at-most']}", text, not missed)


def section(result: Result) -> dict[str, Any]:
    """Return the section of one kernel on one machine: its tables, commit and command."""
    report = result.report
    return {
        "title": f"{result.kernel}, {result.machine.upper()}",
        "machine": tables.machine(report),
        "report": report,
        "plot": result.plot_name,
        "summary": as_markdown(tables.summary(report.rows)),
        "groups": {heading: as_markdown(tables.times(rows)) for heading, rows in tables.groups(report.rows)},
        "hosts": as_markdown(tables.hosts(report.hosts)) if report.hosts else "",
        "notes": tables.notes(report),
    }
