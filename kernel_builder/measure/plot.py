"""Plot a benchmark report: the share of copy speed that each implementation reaches, by operation and shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_builder.errors import MeasureError
from kernel_builder.measure import tables
from kernel_builder.measure.results import COMPILE, EAGER, OURS, BenchmarkReport, Row, shape_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The Okabe-Ito palette, which colour-blind readers can tell apart.
_COLOURS = {OURS: "black", EAGER: "gray", COMPILE: "#d55e00"}
PALETTE = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7")
_WIDTH, _ROW, _HEAD = 8.5, 0.25, 0.75  # inches
# Equal reports give equal files: no date, and no random identifiers.
_REPRODUCIBLE: dict[Any, Any] = {"svg.hashsalt": "kernel-builder", "svg.fonttype": "none"}


def save(report: BenchmarkReport, path: Path) -> None:
    """Write the plot of a report to `path`; the suffix selects the format (.svg, .png, .pdf).

    Raises:
        MeasureError: If matplotlib is not installed.
    """
    with reproducible(str(path)):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        draw(report).savefig(path, metadata=metadata)


@contextmanager
def reproducible(where: str) -> Iterator[None]:
    """Draw equal figures for equal data in this context.

    Args:
        where: What the plots are for, named in the error.

    Raises:
        MeasureError: If matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise MeasureError(
            "matplotlib is not installed, and plots need it",
            where=where,
            hint="pip install torch-kernel-builder[plot]",
        ) from error
    with mpl.rc_context(_REPRODUCIBLE):
        yield


def draw(report: BenchmarkReport) -> Figure:
    """Return the figure: one panel for each operation and pass, one row for each shape, one dot for each share."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if OURS in row.shares]
    panels = tables.groups(rows)
    heights = [_HEAD + _ROW * len(found) for _, found in panels]
    figure = Figure(figsize=(_WIDTH, _HEAD + sum(heights)), layout="constrained")
    figure.suptitle(
        f"{report.kernel}: share of copy speed\n{tables.device(report)}, {report.date[:10]}", fontsize="medium"
    )
    if not panels:
        return figure
    axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    names = [name for name in tables.implementations(rows) if any(name in row.shares for row in rows)]
    colours = dict(zip((name for name in names if name not in _COLOURS), PALETTE * len(names), strict=False))
    for axis, (heading, found) in zip(axes, panels, strict=True):
        _panel(axis, heading, found, names, colours | _COLOURS)
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def _panel(axis: Axes, heading: str, rows: list[Row], names: list[str], colours: dict[str, str]) -> None:
    axis.set_title(heading, loc="left", fontsize="medium")
    axis.axvline(1.0, color="black", linewidth=1, label="copy")
    for name in reversed(names):  # the kernel last, on top of its peers
        found = [(row.shares[name].median, number) for number, row in enumerate(rows) if name in row.shares]
        if found:
            shares, numbers = zip(*found, strict=True)
            axis.plot(shares, numbers, "o", color=colours[name], markersize=7 if name == OURS else 5, label=name)
    axis.set_yticks(range(len(rows)), [shape_name(row.point.shape) for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
