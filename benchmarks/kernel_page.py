"""Write docs/kernels.md and its plots from the results of `kernel-builder benchmark --json`.

    .venv/bin/python benchmarks/kernel_page.py            write them
    .venv/bin/python benchmarks/kernel_page.py --check    fail if the page is not up to date

A result is benchmarks/results/<kernel>.<machine>.json; <kernel>.<machine>.host.json, where it exists, replaces its host
overhead, which needs a machine at rest. The prose is in kernel_page.md, the targets are in kernel_targets.toml.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kernel_builder import toml_file
from kernel_builder.measure import plot, tables
from kernel_builder.measure.results import OURS, BenchmarkReport, HostOverhead, Row, geometric_mean, shape_name

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "kernels.md"
PLOTS = ROOT / "docs" / "kernels"

Reports = Mapping[str, Mapping[str, BenchmarkReport]]
"""Machine -> kernel -> report."""


@dataclass(frozen=True)
class Outcome:
    """One row of the table of targets."""

    what: str
    wanted: str
    measured: str
    met: bool


def read_results(directory: Path = RESULTS) -> dict[str, dict[str, BenchmarkReport]]:
    """Read the reports of all kernels, GPUs before the CPU."""
    found: dict[str, dict[str, BenchmarkReport]] = {}
    paths = [path for path in directory.glob("*.*.json") if not path.name.endswith(".host.json")]
    for path in sorted(paths, key=lambda path: (".cpu." in path.name, path.name)):
        kernel, machine, _ = path.name.split(".")
        if not (ROOT / "kernels" / kernel / "build.toml").exists():
            continue
        report = BenchmarkReport.read(path)
        host = directory / f"{kernel}.{machine}.host.json"
        if host.exists():
            report.hosts = BenchmarkReport.read(host).hosts
        found.setdefault(machine, {})[kernel] = report
    return found


def outcomes(reports: Reports) -> Iterator[Outcome]:
    """Evaluate every target for which there are results."""
    document = toml_file.read(ROOT / "benchmarks" / "kernel_targets.toml")
    untuned = {tuple(shape) for shape in document["untuned-shapes"]}
    for target in document["target"]:
        found = reports.get(target["machine"], {}).values()
        if target["value"] == "host":
            hosts = [host for report in found for host in report.hosts if host.point.passes == target["passes"]]
            yield from _host_outcome(target, hosts)
        else:
            rows = [row for report in found for row in report.rows if _counts(row, target, untuned)]
            yield from _outcome(target, rows)


def _counts(row: Row, target: Mapping[str, Any], untuned: set[tuple[int, ...]]) -> bool:
    """Return whether a row counts for a target. A row without a time counts at any size: it misses the target."""
    point = row.point
    is_untuned = point.shape in untuned or all(size == 1 for size in point.shape[:2])
    return (
        point.operation in target.get("operations", [point.operation])
        and point.passes == target.get("passes", point.passes)
        and list(point.shape) in target.get("shapes", [list(point.shape)])
        and (target.get("all-shapes", False) or is_untuned == target.get("untuned", False))
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
    value = _value(target["value"])
    measured = {index: found for index, row in enumerate(rows) if OURS in row.times and (found := value(row))}
    untimed = sum(OURS in row.faults for row in rows)
    lacking = f", {untimed} of {untimed + len(measured)} without a time" if untimed else ""
    if "mean" in target:
        wanted = f"mean at least {target['mean']}"
        mean = geometric_mean(measured.values()) if measured else 0.0
        text, met = f"{mean:.3f}", mean >= target["mean"]
    else:
        wanted = f"each at least {target['each']}"
        least = min(measured, key=lambda index: measured[index], default=None)
        missed = sum(one < target["each"] for one in measured.values())
        point = rows[least].point if least is not None else None
        text = f"{measured[least]:.3f} at {point.operation} {shape_name(point.shape)}" if point else "nothing"
        text += f", {missed} of {len(measured)} below" if missed else ""
        met = not missed
    if measured or untimed:
        yield Outcome(target["what"], wanted, text + lacking, met and not untimed)


def _host_outcome(target: Mapping[str, Any], hosts: Sequence[HostOverhead]) -> Iterator[Outcome]:
    measured = {host.point.operation: ratio for host in hosts if (ratio := host.relative())}
    if not measured:
        return
    worst = max(measured, key=lambda name: measured[name])
    missed = sum(ratio > target["at-most"] for ratio in measured.values())
    text = f"{measured[worst]:.2f} at {worst}" + (f", {missed} of {len(measured)} above" if missed else "")
    yield Outcome(target["what"], f"each at most {target['at-most']}", text, not missed)


def page(reports: Reports) -> str:
    """Return the text of docs/kernels.md."""
    table = [["target", "", "measured", ""]]
    table += [[one.what, one.wanted, one.measured, "met" if one.met else "missed"] for one in outcomes(reports)]
    sections = [
        section(kernel, machine, report) for machine, found in reports.items() for kernel, report in found.items()
    ]
    template = (ROOT / "benchmarks" / "kernel_page.md").read_text()
    return template.replace("{targets}", tables.as_markdown(table)).replace("{sections}", "\n".join(sections))


def section(kernel: str, machine: str, report: BenchmarkReport) -> str:
    """Return the section of one kernel on one machine: all its tables and the commands that measured them."""
    commit = ((report.build.get("provenance") or {}).get("kernel") or {}).get("commit")
    size = f", {report.build['bytes'] / 1e6:.2f} MB" if report.build.get("bytes") else ""
    source = f", commit {commit[:12]}" if commit else ""
    lines = [
        f"## {kernel}, {machine.upper()}",
        "",
        f"{tables.machine(report)}. Variant `{report.variant}`, build `{report.build['id']}`{size}{source}.",
        "",
        f"    {report.command}",
        "",
        tables.as_markdown(tables.summary(report.rows)),
        "",
        f"![Share of copy speed]({PLOTS.name}/{kernel}.{machine}.svg)",
        "",
    ]
    for heading, rows in tables.groups(report.rows):
        lines += [f"**{heading}**", "", tables.as_markdown(tables.times(rows)), ""]
    if report.hosts:
        lines += ["**Host overhead, microseconds a call**", ""]
        host = RESULTS / f"{kernel}.{machine}.host.json"
        if host.exists():
            lines += [f"    {BenchmarkReport.read(host).command}", ""]
        lines += [tables.as_markdown(tables.hosts(report.hosts)), ""]
    return "\n".join([*lines, *(f"- {note}" for note in tables.notes(report)), ""])


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is not up to date.")
def main(check: bool) -> None:
    """Write docs/kernels.md and its plots from the results."""
    reports = read_results()
    text = page(reports)
    plots = {
        PLOTS / f"{kernel}.{machine}.svg": report
        for machine, found in reports.items()
        for kernel, report in found.items()
    }
    if check:
        stale = [PAGE] if PAGE.read_text() != text else []
        # Plots differ between releases of matplotlib, so only their names are checked.
        stale += sorted(set(PLOTS.glob("*.svg")) ^ plots.keys())
        for path in stale:
            click.echo(f"{path.relative_to(ROOT)} is not up to date: run benchmarks/kernel_page.py", err=True)
        sys.exit(1 if stale else 0)
    PAGE.write_text(text)
    PLOTS.mkdir(exist_ok=True)
    for path in set(PLOTS.glob("*.svg")) - plots.keys():
        path.unlink()
    for path, report in plots.items():
        plot.save(report, path)


if __name__ == "__main__":
    main()
