"""Figures as both pages of them have them: measured one after the other, kept as JSON, shown as a table."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import click

import kernel_builder
from kernel_builder.build.provenance import git_state

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figure:
    """One row of the table.

    Attributes:
        name: What `--only` calls it.
        target, measured: For people; `met` says whether the one keeps to the other. A target of `-` is none.
        commands: As they were typed.
        note: What has to be known to read it.
        values: The numbers, as measured.
        date, commit, load: When, with which builder, and how many processes ran on the machine before and after it.
    """

    name: str
    title: str
    target: str
    measured: str
    met: bool
    commands: tuple[str, ...]
    note: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    commit: str = ""
    load: tuple[float, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether it keeps to its target, where it has one."""
        if self.target == "-":
            return "-"
        return "met" if self.met else "missed"


def builder_commit() -> str:
    """Which commit of the builder is measured."""
    state = git_state(ROOT)
    return f"{state.commit}{' with changes' if state.dirty else ''}" if state else kernel_builder.__version__


def machine(*packages: str) -> dict[str, Any]:
    """On what it is measured, and with which of these packages."""
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


def children_cpu_seconds() -> float:
    """Processor time of all processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def page(title: str, command: str, figures: Sequence[Figure], measured_on: str, commands: Sequence[str] = ()) -> str:
    """The table, and after it how each figure was measured.

    Args:
        title: The page's.
        command: What writes the page.
        figures: In the order of the table.
        measured_on: The machine, in words.
        commands: Paragraphs that stand before the figures' commands.
    """
    lines = [
        f"# {title}",
        "",
        f"Written by `{command.split()[1]}`, which has the exact way each is measured.",
        "",
        f"    {command}",
        "",
        "| figure | target | measured | |",
        "| --- | --- | --- | --- |",
        *(f"| {one.title} | {one.target} | {one.measured} | {one.verdict} |" for one in figures),
        "",
        measured_on,
        "",
    ]
    for paragraph in commands:
        lines += [paragraph, ""]
    for one in figures:
        lines += [f"**{one.name}**: {one.title}", "", *(f"    {command}" for command in one.commands), ""]
        loads = " and ".join(f"{load:.1f}" for load in one.load)
        lines += [f"{one.note} Measured on {one.date[:10]}, at a load of {loads}.".strip(), ""]
    return "\n".join(lines).rstrip() + "\n"


def options(names: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a command that measures these figures."""

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            click.option("--markdown", type=click.Path(path_type=Path), help="Write the table here."),
            click.option(
                "--json",
                "json_file",
                type=click.Path(path_type=Path),
                help="Write all that was measured here; what is there of other figures is kept.",
            ),
            click.option("--only", type=click.Choice(names), multiple=True, help="Only this figure; may be repeated."),
        ):
            command = option(command)
        return command

    return with_options


def measure(
    measurements: Mapping[str, Callable[[], Figure]],
    chosen: Sequence[str],
    measured_on: Mapping[str, Any],
    as_markdown: Callable[[Sequence[Figure]], str],
    *,
    json_file: Path | None,
    markdown: Path | None,
) -> int:
    """Measure the chosen figures, print them, and write what was asked for; returns the exit status."""
    commit = builder_commit()
    figures: dict[str, Figure] = {}
    if json_file and json_file.exists():
        figures = {one["name"]: Figure(**one) for one in json.loads(json_file.read_text())["figures"]}
    failed: list[str] = []
    for name in chosen:
        started, load = time.perf_counter(), os.getloadavg()[0]
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        try:
            figure = measurements[name]()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            click.secho(f"{name}: {error}", fg="red", err=True)
            failed.append(name)
            continue
        click.echo(f"{figure.name}: {figure.measured} ({figure.target}: {figure.verdict})")
        click.echo(f"    {time.perf_counter() - started:.0f} s", err=True)
        figures[name] = replace(figure, date=now, commit=commit, load=(load, os.getloadavg()[0]))
    ordered = [figures[name] for name in measurements if name in figures]
    if json_file:
        report = {"machine": dict(measured_on), "figures": [asdict(figure) for figure in ordered], "failed": failed}
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    if markdown:
        markdown.write_text(as_markdown(ordered))
    return 1 if failed else 0
