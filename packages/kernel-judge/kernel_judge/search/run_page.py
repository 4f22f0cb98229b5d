"""The report of a search as one HTML file, with its plots inside."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from kernel_format.errors import MeasureError
from kernel_format.files import write_atomically
from kernel_judge.search.run_report import AttemptResult, Group, RunReport, Table, notes, shortened, summary_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 8.5, 3.2  # inches
_SHOWN = (".py", ".toml", ".cpp", ".h", ".hpp", ".cu", ".cuh")  # of a project
_MOST_TEXT = 60_000  # characters of the code of a try
_PALETTE = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7")  # Okabe-Ito, for color-blind readers
# Equal reports give equal files: no random identifiers.
_REPRODUCIBLE: dict[Any, Any] = {"svg.hashsalt": "kernel-builder", "svg.fonttype": "none"}


def save_page(report: RunReport, path: Path) -> None:
    """Write the report to an HTML file that needs no other file.

    Raises:
        MeasureError: If matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise MeasureError(
            "matplotlib is not installed, and plots need it",
            where=str(path),
            hint="pip install torch-kernel-judge[plot]",
        ) from error
    with mpl.rc_context(_REPRODUCIBLE):
        plots = [_svg(_attempt_figure(report)), _svg(_estimate_figure(report.groups))]
    tasks = sorted({attempt.task for attempt in report.attempts})
    directory = path.absolute().parent
    environment = Environment(
        loader=PackageLoader("kernel_judge.search"), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    page = environment.get_template("report.html.jinja").render(
        title=f"Search: {', '.join(tasks[:3])}{' and others' if tasks[3:] else ''}",
        notes=notes(report),
        summary=summary_table(report),
        plots=plots,
        attempts=report.attempts,
        attempt_rows=_attempt_table(report.attempts),
        peer=report.peer,
        shortened=shortened,
        link=lambda log: quote(os.path.relpath(log, directory)),
        as_json=lambda verdict: json.dumps(verdict.as_dict(), indent=1),
        sources=_sources,
    )
    write_atomically(path, page)


def _attempt_table(attempts: Sequence[AttemptResult]) -> Table:
    head = ["agent", "task", "context", "attempt", "first right try", "speed", "seconds"]
    return [head] + [
        [
            attempt.agent,
            attempt.task,
            attempt.context,
            str(attempt.number),
            str(attempt.first_right or "-"),
            f"{attempt.speed:.2f}" if attempt.speed is not None else "wrong",
            f"{attempt.busy_seconds:.1f}",
        ]
        for attempt in attempts
    ]


def _sources(code: Path | None) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of an agent's kernel. Its links are not followed: they may point anywhere."""
    if code is None:
        return
    files = [code] if code.is_file() else sorted(path for path in code.rglob("*") if path.suffix in _SHOWN)
    left = _MOST_TEXT
    for file in files:
        if not file.is_file() or not file.resolve().is_relative_to(code.resolve()) or not left:
            continue
        with file.open("rb") as opened:
            text = opened.read(left).decode(errors="replace")
        left -= len(text)
        yield file.relative_to(code.parent).as_posix(), text


def _svg(figure: Figure) -> str:
    """Return a figure as an SVG element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _attempt_figure(report: RunReport) -> Figure:
    """Draw the speed of each attempt, in the order of the attempts; a cross where none of its tries is right."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axis = figure.subplots()
    for index, agent in enumerate(sorted({attempt.agent for attempt in report.attempts})):
        speeds = [(place, attempt.speed) for place, attempt in enumerate(report.attempts, 1) if attempt.agent == agent]
        color = _PALETTE[index % len(_PALETTE)]
        right = [(place, speed) for place, speed in speeds if speed is not None]
        wrong = [place for place, speed in speeds if speed is None]
        axis.plot([x for x, _ in right], [y for _, y in right], "o", color=color, label=shortened(agent))
        axis.plot(wrong, [1.0] * len(wrong), "x", color=color)
    axis.axhline(1.0, color="black", linewidth=1)
    axis.set_title(f"speed of each attempt relative to {report.peer} (x: not right)", loc="left", fontsize="medium")
    axis.set_xlabel("attempt")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _finish(axis)
    return figure


def _estimate_figure(groups: Sequence[Group]) -> Figure:
    """Draw pass@k and speedup@k over k, for all attempts and for each agent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, group in enumerate(group for group in groups if group.by in ("all", "agent")):
        color = "black" if group.by == "all" else _PALETTE[(index - 1) % len(_PALETTE)]
        for axis, values in ((left, group.pass_at), (right, group.speedup_at)):
            axis.plot(list(values), list(values.values()), "o-", color=color, label=shortened(group.name))
    for axis, title in ((left, "pass@k"), (right, "speedup@k, floor 1.0")):
        axis.set_title(title, loc="left", fontsize="medium")
        axis.set_xlabel("k")
        axis.set_xscale("log", base=2)
        _finish(axis)
    left.set_ylim(0, 1.05)
    return figure


def _finish(axis: Axes) -> None:
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
