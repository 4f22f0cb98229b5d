"""Measures figures, keeps their values as JSON, and writes a page with a table of them.

A figure's title, target and note are code; the JSON has only what was measured. With `--page-only`, a script writes the
page from the JSON, so that texts change without a new measurement.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import click
import result_files

import kernel_builder
from kernel_builder.measure.estimates import estimate
from kernel_builder.steps.provenance import git_state

ROOT = Path(__file__).resolve().parent.parent

Values = Mapping[str, Any]
"""The measured numbers of one figure, as the JSON has them."""

Place = TypeVar("Place")
"""The argument of a measurement: a workspace, or a directory."""


@dataclass(frozen=True)
class Measured:
    """The result of a measurement.

    Attributes:
        commands: The measured commands, as a user types them.
        values: Whatever the figure's row is computed from; JSON can hold it.
    """

    commands: tuple[str, ...]
    values: Values


@dataclass(frozen=True)
class Row:
    """A figure's row in the table, computed from its values.

    Attributes:
        target: Empty if the figure has none.
        met: Whether the measured values meet the target.
        note: What a reader needs to interpret the figure; printed below its commands.
    """

    title: str
    target: str
    measured: str
    met: bool = True
    note: str = ""

    @property
    def verdict(self) -> str:
        """Return `met` or `missed`, or `-` if there is no target."""
        if not self.target:
            return "-"
        return "met" if self.met else "missed"


@dataclass(frozen=True)
class Figure(Generic[Place]):
    """How a figure is measured, and how its values become a row of the table."""

    measure: Callable[[Place], Measured]
    row: Callable[[Values], Row]


@dataclass(frozen=True)
class Record:
    """A measured figure, as the JSON has it.

    Attributes:
        name: The figure's name for `--only`.
        commit: The commit of the measured builder.
        cores: How many the machine had, which need not be that of the other figures.
        load: The machine's load average before and after the measurement.
    """

    name: str
    commands: tuple[str, ...]
    values: Values
    date: str
    commit: str
    cores: int
    load: tuple[float, float]


@dataclass(frozen=True)
class FiguresPage:
    """A page of figures and the script that measures them.

    Attributes:
        command: Measures all figures and writes the page.
        figures: Name -> figure, in the order of the table.
        describe_machine: Describes the machine of a report in one line.
        introduction: Paragraphs between the table and the figures' commands.
    """

    title: str
    command: str
    figures: Mapping[str, Figure[Any]]
    describe_machine: Callable[[Mapping[str, Any]], str]
    introduction: tuple[str, ...] = ()

    def rows(self, report: Mapping[str, Any]) -> dict[str, Row]:
        """Return figure -> its row of the table, for those that a report has."""
        records = _read_records(report)
        return {name: figure.row(records[name].values) for name, figure in self.figures.items() if name in records}

    def markdown(self, report: Mapping[str, Any]) -> str:
        """Return the page for a report, the parsed JSON."""
        records, rows = _read_records(report), self.rows(report)
        lines = [
            f"# {self.title}",
            "",
            f"`{self.command.split()[1]}` writes this page; the script defines how each figure is measured.",
            "",
            f"    {self.command}",
            "",
            "| figure | target | measured | |",
            "| --- | --- | --- | --- |",
            *(f"| {row.title} | {row.target or '-'} | {row.measured} | {row.verdict} |" for row in rows.values()),
            "",
            self.describe_machine(report["machine"]),
            "",
            f"<!-- measured: {Path(self.command.split()[3]).stem} -->",
            "",
        ]
        for paragraph in self.introduction:
            lines += [paragraph, ""]
        for name, row in rows.items():
            lines += _section(records[name], row)
        return "\n".join(lines).rstrip() + "\n"


def _section(record: Record, row: Row) -> Iterator[str]:
    yield from (f"**{record.name}**: {row.title}", "", *(f"    {command}" for command in record.commands), "")
    before, after = record.load
    commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]{28}", r"\1", record.commit)
    measured = (
        f"Measured on {record.date[:10]}, commit {commit}, {record.cores} cores; "
        f"load average {before:.1f} before, {after:.1f} after."
    )
    yield from (f"{row.note} {measured}".strip(), "")


def _read_records(report: Mapping[str, Any]) -> dict[str, Record]:
    names = [field.name for field in fields(Record)]
    records = (Record(**{name: entry[name] for name in names}) for entry in report["figures"])
    return {record.name: record for record in records}


def describe_commit() -> str:
    """Return the commit of the builder that is measured, or its version outside a git checkout."""
    sources = (path for path in (ROOT / "kernel_builder").rglob("*") if path.is_file() and path.suffix != ".pyc")
    state = git_state(ROOT, sources)
    return f"{state.commit}{' with changes' if state.dirty else ''}" if state else kernel_builder.__version__


def machine(*packages: str) -> dict[str, Any]:
    """Return the machine's hardware and system, and the versions of Python, the builder and these packages."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory-bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", platform.platform()),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
        "kernel-builder": kernel_builder.__version__,
    }


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Return what the JSON keeps of samples: their median, the interval of `estimate`, and how many there are."""
    return {**estimate(samples)._asdict(), "n": len(samples)}


def children_cpu_seconds() -> float:
    """Return the CPU time of all processes that this one has started and waited for, user and system."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def options(names: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options common to all scripts that measure figures."""

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        path = click.Path(path_type=Path)
        for option in (
            click.option("--page-only", is_flag=True, help="Measure nothing; write --markdown from --json."),
            click.option("--markdown", type=path, help="Write the page to this file."),
            click.option(
                "--json", "json_file", type=path, help="Write results to this file; it keeps figures not measured now."
            ),
            click.option("--only", type=click.Choice(names), multiple=True, help="Only this figure; may be repeated."),
        ):
            command = option(command)
        return command

    return with_options


def write_page(page: FiguresPage, json_file: Path | None, markdown: Path | None) -> None:
    """Write a page from the results in a JSON file, without measuring.

    Raises:
        click.UsageError: If one of the files is not given.
    """
    if json_file is None or markdown is None:
        raise click.UsageError("--page-only needs --json and --markdown")
    markdown.write_text(page.markdown(json.loads(json_file.read_text())))


def measure(
    page: FiguresPage,
    chosen: Sequence[str],
    measure_one: Callable[[str], Measured],
    measured_on: Mapping[str, Any],
    *,
    json_file: Path | None,
    markdown: Path | None,
) -> int:
    """Measure the chosen figures, print them, and write the files after each; returns the exit status.

    Args:
        measure_one: Measures the figure of this name.
        measured_on: The machine.
    """
    records: dict[str, Record] = {}
    if json_file and json_file.exists():
        records = _read_records(json.loads(json_file.read_text()))
    failed: list[str] = []

    def write() -> None:
        ordered = [asdict(records[name]) for name in page.figures if name in records]
        report = {"machine": dict(measured_on), "figures": ordered, "failed": failed}
        if json_file:
            result_files.write(json_file, report)
        if markdown:
            markdown.write_text(page.markdown(report))

    for name in chosen:
        started = time.perf_counter()
        try:
            record = _record(name, measure_one, measured_on["cores"])
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            click.secho(f"{name}: {error}", fg="red", err=True)
            failed.append(name)
            continue
        row = page.figures[name].row(record.values)
        click.echo(f"{name}: {row.measured} (target: {row.target or '-'}; {row.verdict})")
        click.echo(f"    measured in {time.perf_counter() - started:.0f} s", err=True)
        records[name] = record
        write()
    write()
    return 1 if failed else 0


def _record(name: str, measure_one: Callable[[str], Measured], cores: int) -> Record:
    load = os.getloadavg()[0]
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    measured = measure_one(name)
    values = json.loads(json.dumps(measured.values))  # the row sees the same types now and from the file
    return Record(name, measured.commands, values, date, describe_commit(), cores, (load, os.getloadavg()[0]))
