"""The tables and plots of docs/kernels.md, from the results of `kernel-builder benchmark --json`.

`make docs` writes them into the site, where docs/kernels.md has `<!-- targets -->` and `<!-- sections -->`.

A result is benchmarks/results/<kernel>.<machine>.json. Host overhead needs a machine at rest, so it can have a file of
its own, <kernel>.<machine>.host.json; the later measurement of it counts. The targets are in kernel_targets.toml.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measured_sources import changes, described

from kernel_builder import toml_file
from kernel_builder.measure import plot, tables
from kernel_builder.measure.results import (
    OURS,
    YARDSTICK,
    BenchmarkReport,
    HostOverhead,
    Row,
    geometric_mean,
    shape_name,
)
from kernel_builder.plural import listed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KERNELS = ROOT / "kernels"


@dataclass(frozen=True)
class Result:
    """What was measured of one kernel on one machine.

    Attributes:
        report: The device times.
        host_report: The report with the host overhead; often the same.
    """

    kernel: str
    machine: str
    report: BenchmarkReport
    host_report: BenchmarkReport

    @property
    def title(self) -> str:
        """Name the kernel and the machine."""
        return f"{self.kernel}, {self.machine.upper()}"


@dataclass(frozen=True)
class Outcome:
    """One row of the table of targets."""

    what: str
    wanted: str
    measured: str
    met: bool


def read_results(directory: Path = RESULTS) -> list[Result]:
    """Read the results of all kernels, GPUs before the CPU."""
    results = []
    paths = [path for path in directory.glob("*.*.json") if not path.name.endswith(".host.json")]
    for path in sorted(paths, key=lambda path: (".cpu." in path.name, path.name.split(".")[::-1])):
        kernel, machine, _ = path.name.split(".")
        if not (KERNELS / kernel / "build.toml").exists():
            continue
        report = host_report = BenchmarkReport.read(path)
        separate = directory / f"{kernel}.{machine}.host.json"
        if separate.exists():
            host_report = BenchmarkReport.read(separate)
            if report.hosts and report.date > host_report.date:
                host_report = report
        results.append(Result(kernel, machine, report, host_report))
    return results


def untuned_shapes() -> set[tuple[int, ...]]:
    """Return the declared shapes that the kernels are not tuned for."""
    return {tuple(shape) for shape in _targets()["untuned-shapes"]}


def is_untuned(row: Row, untuned: set[tuple[int, ...]]) -> bool:
    """Return whether a row's shape is one that the kernels are not tuned for; a single row of a tensor is one, too."""
    return row.point.shape in untuned or all(size == 1 for size in row.point.shape[:2])


def _targets() -> dict[str, Any]:
    return toml_file.read(ROOT / "benchmarks" / "kernel_targets.toml")


def outcomes(results: Sequence[Result]) -> Iterator[Outcome]:
    """Evaluate every target for which there are results."""
    untuned = untuned_shapes()
    for target in _targets()["target"]:
        measured = [result for result in results if result.machine == target["machine"]]
        if target["value"] == "host":
            hosts = [host for result in measured for host in result.host_report.hosts]
            yield from _host_outcome(target, [host for host in hosts if host.point.passes == target["passes"]])
        else:
            rows = [row for result in measured for row in result.report.rows if _counts(row, target, untuned)]
            yield from _outcome(target, rows)


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


def _outcome(target: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[Outcome]:
    value_of = _value(target["value"])
    measured = {number: value for number, row in enumerate(rows) if OURS in row.times and (value := value_of(row))}
    untimed = sum(OURS in row.faults for row in rows)
    lacking = f", {untimed} of {untimed + len(measured)} without a time" if untimed else ""
    if "mean" in target:
        wanted = f"mean at least {target['mean']}"
        mean = geometric_mean(measured.values()) if measured else 0.0
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
        yield Outcome(target["what"], wanted, text + lacking, met and not untimed)


def _host_outcome(target: Mapping[str, Any], hosts: Sequence[HostOverhead]) -> Iterator[Outcome]:
    measured = {host.point.operation: ratio for host in hosts if (ratio := host.relative(YARDSTICK))}
    if not measured:
        return
    worst = max(measured, key=lambda name: measured[name])
    missed = sum(ratio > target["at-most"] for ratio in measured.values())
    text = f"{measured[worst]:.2f} at {worst}" + (f", {missed} of {len(measured)} above" if missed else "")
    yield Outcome(target["what"], f"each at most {target['at-most']}", text, not missed)


def fill(page: str, results: Sequence[Result]) -> str:
    """Return docs/kernels.md with its tables, and with what has changed since they were measured."""
    table = [["target", "", "measured", ""]]
    table += [
        [outcome.what, outcome.wanted, outcome.measured, "met" if outcome.met else "missed"]
        for outcome in outcomes(results)
    ]
    parts = {
        "<!-- targets -->": "\n".join([tables.as_markdown(table), "", _changed_since(results)]),
        "<!-- sections -->": "\n".join(map(section, results)),
    }
    for marker, text in parts.items():
        if page.count(marker) != 1:
            raise ValueError(f"docs/kernels.md must have {marker} once")
        page = page.replace(marker, text)
    return page


def _changed_since(results: Sequence[Result]) -> str:
    """Say which results are not of the sources as they are now."""
    changed, unknown = [], []
    for result in results:
        for report, what in _reports(result):
            since = changes(KERNELS / result.kernel, report.variant, report.build)
            if since or since is None:
                (unknown if since is None else changed).append(f"{result.kernel} ({result.machine.upper()}{what})")
    sentences = [
        f"Sources have changed since these were measured: {listed(changed)}."
        if changed
        else "No recorded source has changed since the measurements.",
        f"Whether they have is unknown of these: {listed(unknown)}." if unknown else "",
        "Each section names the commit that was measured.",
    ]
    return " ".join(filter(None, sentences))


def _reports(result: Result) -> Iterator[tuple[BenchmarkReport, str]]:
    yield result.report, ""
    if result.host_report is not result.report:
        yield result.host_report, ", host overhead"


def section(result: Result) -> str:
    """Return the section of one kernel on one machine: all its tables, and the commits and commands they are of."""
    report = result.report
    lines = [
        f"## {result.title}",
        "",
        _origin(result, report),
        "",
        f"    {report.command}",
        "",
        tables.as_markdown(tables.summary(report.rows)),
        "",
        f"![Share of copy speed]({plot_name(result)})",
        "",
    ]
    for heading, rows in tables.groups(report.rows):
        lines += [f"**{heading}**", "", tables.as_markdown(tables.times(rows)), ""]
    if result.host_report.hosts:
        lines += ["**Host overhead, microseconds a call**", ""]
        if result.host_report is not report:
            lines += [_origin(result, result.host_report), "", f"    {result.host_report.command}", ""]
        lines += [tables.as_markdown(tables.hosts(result.host_report.hosts, YARDSTICK)), ""]
    notes = dict.fromkeys(note for reported, _ in _reports(result) for note in tables.notes(reported))
    return "\n".join([*lines, *(f"- {note}" for note in notes), ""])


def _origin(result: Result, report: BenchmarkReport) -> str:
    size = f", {report.build['bytes'] / 1e6:.2f} MB" if report.build.get("bytes") else ""
    return (
        f"{tables.machine(report)}. Variant `{report.variant}`, build `{report.build['id']}`{size}. "
        f"{described(KERNELS / result.kernel, report.variant, report.build)}"
    )


def plot_name(result: Result) -> str:
    """Return the path of a result's plot, relative to the page."""
    return f"kernels/{result.kernel}.{result.machine}.svg"


def draw(result: Result) -> bytes:
    """Return the plot of a result as an SVG file."""
    with plot.reproducible(plot_name(result)):
        file = io.BytesIO()
        plot.draw(result.report).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
