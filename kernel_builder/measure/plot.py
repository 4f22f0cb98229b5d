"""Plot a benchmark report: the share of copy speed that each implementation reaches, by operation and shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kernel_builder.measure import tables
from kernel_builder.measure.results import COMPILE, EAGER, OURS, BenchmarkReport
from kernel_format.errors import MeasureError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The Okabe-Ito palette, which colour-blind readers can tell apart.
_COLOURS = {OURS: "black", EAGER: "gray", COMPILE: "#d55e00"}
PALETTE = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7")
_WIDTH, _ROW, _HEAD = 8.5, 0.25, 1.5  # inches
# Equal reports give equal files: no date, and no random identifiers.
_REPRODUCIBLE: dict[Any, Any] = {"svg.hashsalt": "kernel-builder", "svg.fonttype": "none"}


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
    """Return the figure: a line for each point, a dot for each share."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if OURS in row.shares]
    figure = Figure(figsize=(_WIDTH, _HEAD + _ROW * len(rows)), layout="constrained")
    figure.suptitle(
        f"{report.kernel}: share of copy speed\n{tables.device(report)}, {report.date[:10]}", fontsize="medium"
    )
    if not rows:
        return figure
    axis = figure.subplots()
    axis.axvline(1.0, color="black", linewidth=1, label="copy")
    names = [name for name in tables.implementations(rows) if any(name in row.shares for row in rows)]
    colours = dict(zip((name for name in names if name not in _COLOURS), PALETTE * len(names), strict=False)) | _COLOURS
    for height, name in enumerate(reversed(names)):  # the kernel on top of its peers
        dots = [(row.shares[name].median, at) for at, row in enumerate(rows) if name in row.shares]
        axis.plot(*zip(*dots, strict=True), "o", color=colours[name], zorder=3 + height, label=name)
    axis.set_yticks(range(len(rows)), [str(row.point) for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.tick_params(labeltop=True, top=True)
    axis.grid(alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    return figure
