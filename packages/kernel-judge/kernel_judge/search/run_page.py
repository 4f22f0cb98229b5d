"""The report of a search as one HTML file, with its plots inside."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from kernel_builder.measure.plot import PALETTE, reproducible
from kernel_builder.measure.tables import Table
from kernel_format.files import write_atomically
from kernel_judge.search.run_report import AttemptResult, Group, RunReport, notes, shortened, summary_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 8.5, 3.2  # inches
_SHOWN = (".py", ".toml", ".cpp", ".h", ".hpp", ".cu", ".cuh")  # of a project
_MOST_TEXT = 60_000  # characters of the code of a try
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-size: 0.85rem; }}
th, td {{ padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
th, td:not(:first-child) {{ overflow-wrap: normal; }}
details {{ margin: 0.3rem 0; padding: 0.2rem 0.6rem; border-left: 3px solid #ddd; }}
pre {{ overflow-x: auto; background: #f6f6f6; padding: 0.6rem; font-size: 0.8rem; overflow-wrap: normal; }}
svg {{ max-width: 100%; height: auto; }}
</style>
<h1>{title}</h1>
{body}
</html>
"""


def save_page(report: RunReport, path: Path) -> None:
    """Write the report to an HTML file that needs no other file.

    Raises:
        MeasureError: If matplotlib is not installed.
    """
    tasks = sorted({attempt.task for attempt in report.attempts})
    title = f"Search: {', '.join(tasks[:3])}{' and others' if tasks[3:] else ''}"
    with reproducible(str(path)):
        plots = [_svg(_attempt_figure(report)), _svg(_estimate_figure(report.groups))]
    parts = [
        *(f"<p>{escape(note)}</p>" for note in notes(report)),
        _table(summary_table(report)),
        *plots,
        "<h2>Attempts</h2>",
        _table(_attempt_table(report.attempts)),
        *(_unfolded(attempt, report.peer, path.absolute().parent) for attempt in report.attempts),
    ]
    write_atomically(path, _PAGE.format(title=escape(title), body="\n".join(parts)))


def _table(table: Table) -> str:
    head, *rows = ([escape(cell) for cell in row] for row in table)
    lines = ["<table>", "<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])


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


def _unfolded(attempt: AttemptResult, peer: str, directory: Path) -> str:
    """Return what a click unfolds: each try of an attempt with its verdict, its code and a link to its log.

    Args:
        directory: That of the page, to which links are relative.
    """
    speed = "not right" if attempt.speed is None else f"{attempt.speed:.2f} times {peer}"
    title = f"{attempt.task}, attempt {attempt.number} ({shortened(attempt.agent)}): {speed}"
    parts = ["<details>", f"<summary>{escape(title)}</summary>"]
    for each in attempt.details:
        log = escape(quote(os.path.relpath(each.log, directory)))
        speeds = f", {each.speed(peer)}" if each.speed(peer) else ""
        parts.append(f'<h3>Try {each.number}: {each.outcome}{escape(speeds)} (<a href="{log}">log</a>)</h3>')
        parts += [f"<p>{escape(each.reason)}</p>"] if each.reason else []
        parts += [f"<p>suspicious: {escape(fact)}</p>" for fact in (each.verdict.suspicious if each.verdict else ())]
        if each.verdict:
            parts.append(_folded("verdict", json.dumps(each.verdict.as_dict(), indent=1)))
        parts += [_folded(name, text) for name, text in _sources(each.code)]
    return "\n".join([*parts, "</details>"])


def _folded(title: str, text: str) -> str:
    return f"<details open><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _sources(code: Path | None) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of what an agent wrote. Its links are not followed: they may point anywhere."""
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
        colour = PALETTE[index % len(PALETTE)]
        right = [(place, speed) for place, speed in speeds if speed is not None]
        wrong = [place for place, speed in speeds if speed is None]
        axis.plot([x for x, _ in right], [y for _, y in right], "o", color=colour, label=shortened(agent))
        axis.plot(wrong, [1.0] * len(wrong), "x", color=colour)
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
        colour = "black" if group.by == "all" else PALETTE[(index - 1) % len(PALETTE)]
        for axis, values in ((left, group.pass_at), (right, group.speedup_at)):
            axis.plot(list(values), list(values.values()), "o-", color=colour, label=shortened(group.name))
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
