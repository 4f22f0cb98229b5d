"""A roofline of timed shapes as SVG: memory throughput against the operations per byte, beside the device's limit."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_sandbox.programs import root_directory

_COLORS = {"candidate": "#c2410c", "eager": "#2563eb", "compile": "#15803d", "max-autotune": "#7e22ce"}
_ROOF = "#78716c"
_LEAST, _MOST = 1e-30, 1e30  # of a figure other than 0; smaller ones, larger ones and NaN are no measurements
_SETTINGS = {"svg.hashsalt": "roofline", "svg.fonttype": "none"}  # the same bytes each time; text as text


def roofline(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return the drawing of the cases of verdicts; empty if none has a limit.

    The y axis has GB/s: bytes that must move, divided by the time. The roof is the copy speed, and falls where the
    operations take longer. A dash is the limit of a shape. Shapes without counted operations are at the left edge.
    """
    with root_directory():  # a file matplotlibrc of the current one would change the drawing
        import matplotlib as mpl
        import matplotlib.style
        from matplotlib.figure import Figure

    cases = [case for case in cases if _is_timed(case)]
    if not cases:
        return ""
    memory = max(case["limit"]["gigabytes-per-second"] for case in cases)
    matrix = max(case["limit"].get("gigaflops", 0) for case in cases)
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in (*_COLORS, "shapes")}
    for case in cases:
        for name, milliseconds in (*case["milliseconds"].items(), ("shapes", case["limit"]["milliseconds"])):
            if name in points and milliseconds > 0:
                points[name].append((case["operations"] / case["bytes"], case["bytes"] / milliseconds * 1e-6))
    edge = 4 * max(1.0, matrix / memory, *(intensity for intensity, _ in points["shapes"]))
    roof = [(0, memory), (matrix / memory, memory), (edge, matrix / edge)] if matrix else [(0, memory), (edge, memory)]
    drawing = io.StringIO()
    with mpl.style.context("default"), mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(*zip(*roof, strict=True), color=_ROOF, label="limit")
        axes.scatter(*zip(*points["shapes"], strict=True), color=_ROOF, marker="_")
        for name, color in _COLORS.items():
            if points[name]:
                axes.scatter(*zip(*points[name], strict=True), color=color, alpha=0.75, label=name)
        axes.set(xscale="symlog", yscale="log", xlim=(-0.2, edge), xlabel="operations per byte", ylabel="GB/s")
        figure.legend(loc="outside upper center", ncols=len(_COLORS) + 1, frameon=False)
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    return drawing.getvalue().partition("?>")[2].partition('"http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">')[2]


def _is_timed(case: Any) -> bool:
    """Return whether a case, which may be of an untrusted file, has all figures."""
    try:
        limit = case["limit"]
        positive = [case["bytes"], limit["milliseconds"], limit["gigabytes-per-second"]]
        figures = [*positive, case["operations"], limit.get("gigaflops", 0), *case["milliseconds"].values()]
        return min(positive) > 0 and all(
            type(each) in (int, float) and (each == 0 or _LEAST < each < _MOST) for each in figures
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
