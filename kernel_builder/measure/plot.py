"""Plot a benchmark report: the share of copy speed that each implementation reaches, by operation and shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_builder.measure import tables
from kernel_builder.measure.results import COMPILE, EAGER, OURS, BenchmarkReport, shape_name
from kernel_format.errors import MeasureError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The Okabe-Ito palette, which colour-blind readers can tell apart.
_COLOURS = {OURS: "black", EAGER: "gray", COMPILE: "#d55e00"}
PALETTE = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7")
_WIDTH, _ROW, _HEAD = 8.5, 0.25, 1.5  # inches
# Equal reports give equal files: no date, and no random identifiers.
_REPRODUCIBLE: dict[Any, Any] = {"svg.hashsalt": "kernel-builder", "svg.fonttype": "none"}


def save(report: BenchmarkReport, path: Path) -> None:
    """Write the plot of a report to `path`; the suffix selects the format (.svg, .png, .pdf)."""
    with reproducible(str(path)):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        draw(report).savefig(path, metadata=metadata)


@contextmanager
def reproducible(where: str) -> Iterator[None]:
    """Draw equal figures for equal data in this context.

    Args:
        where: The purpose of the plots, named in the error.
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
    """Return the figure: a group for each operation and pass, a line for each shape, a dot for each share.

    All groups are in one pair of axes: matplotlib takes a tenth of a second for each pair.
    """
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if OURS in row.shares]
    groups = tables.groups(rows)
    figure = Figure(figsize=(_WIDTH, _HEAD + _ROW * (len(rows) + 2 * len(groups))), layout="constrained")
    figure.suptitle(
        f"{report.kernel}: share of copy speed\n{tables.device(report)}, {report.date[:10]}", fontsize="medium"
    )
    if not groups:
        return figure
    axis = figure.subplots()
    axis.axvline(1.0, color="black", linewidth=1, label="copy")
    heights: list[int] = []  # of the rows, downwards
    height = 0
    for heading, members in groups:
        axis.text(0.02, height, heading, verticalalignment="center", fontsize="medium")
        heights += range(height + 1, height + 1 + len(members))
        height += len(members) + 2
    names = [name for name in tables.implementations(rows) if any(name in row.shares for row in rows)]
    colours = dict(zip((name for name in names if name not in _COLOURS), PALETTE * len(names), strict=False)) | _COLOURS
    for name in reversed(names):  # the kernel last, on top of its peers
        dots = [(row.shares[name].median, at) for at, row in zip(heights, rows, strict=True) if name in row.shares]
        axis.plot(*zip(*dots, strict=True), "o", color=colours[name], markersize=7 if name == OURS else 5, label=name)
    axis.set_yticks(heights, [shape_name(row.point.shape) for row in rows])
    axis.set_ylim(height - 1, -1)
    axis.set_xlim(left=0)
    axis.tick_params(labeltop=True, top=True)
    axis.grid(alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    return figure
