"""A report as a picture: for each operation and shape, what share of a copy's speed everyone reaches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from xml.etree import ElementTree

from kernel_builder.measure import tables
from kernel_builder.measure.results import COMPILE, EAGER, OURS, Report, Row, shape_name

# Of Okabe and Ito, told apart by all eyes; ours is dark on light and light on dark.
_KNOWN = {EAGER: "#8c959f", COMPILE: "#d55e00"}
_COLOURS = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7")
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 14px }
.quiet { fill: #656d76; font-size: 11px }
.line { stroke: #d0d7de }
.copy { stroke: #1f2328; stroke-width: 1.5 }
.ours { fill: #1f2328 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .quiet { fill: #8d96a0 }
  .line { stroke: #30363d }
  .copy { stroke: #e6edf3 }
  .ours { fill: #e6edf3 }
}
"""
_LEFT, _WIDTH, _RIGHT = 190, 560, 60
_ROW, _HEAD, _TOP = 20, 58, 64


def draw(report: Report) -> str:
    """The picture, as SVG, for light and dark pages."""
    rows = [row for row in report.rows if OURS in row.shares]
    names = [name for name in tables.implementations(rows) if any(name in row.shares for row in rows)]
    others = [name for name in names if name not in (OURS, *_KNOWN)]
    colours = _KNOWN | dict(zip(others, itertools.cycle(_COLOURS), strict=False))
    most = max((share.median for row in rows for share in row.shares.values()), default=1.0)
    panels = tables.groups(rows)
    height = _TOP + sum(_HEAD + _ROW * len(found) for _, found in panels)
    width = _LEFT + _WIDTH + _RIGHT
    svg = ElementTree.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", width=str(width), role="img"
    )
    ElementTree.SubElement(svg, "title").text = f"{report.kernel}: share of a copy's speed"
    ElementTree.SubElement(svg, "style").text = _STYLE
    _text(svg, 10, 20, f"{report.kernel}: share of the speed of a copy of as many bytes", "title")
    _text(svg, 10, 37, tables.machine(report), "quiet")
    x = 10.0
    for name in names:
        _dot(svg, x + 5, 52, name, colours)
        _text(svg, x + 14, 56, name)
        x += 30 + 7.2 * len(name)
    top = float(_TOP)
    for heading, found in panels:
        _panel(svg, top, heading, found, names, colours, max(1.0, most) * 1.02)
        top += _HEAD + _ROW * len(found)
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _panel(
    svg: ElementTree.Element,
    top: float,
    heading: str,
    rows: Sequence[Row],
    names: Sequence[str],
    colours: dict[str, str],
    most: float,
) -> None:
    def place(share: float) -> float:
        return _LEFT + _WIDTH * share / most

    _text(svg, 10, top + 22, heading, "title")
    first, last = top + 34, top + 34 + _ROW * len(rows)
    for tenths in range(0, int(most * 10) + 1, 2):
        x = place(tenths / 10)
        _line(svg, x, first, x, last, "copy" if tenths == 10 else "line")
        _text(svg, x, last + 14, "copy" if tenths == 10 else f"{tenths / 10:.1f}", "quiet", "middle")
    for number, row in enumerate(rows):
        y = first + _ROW * (number + 0.5)
        _text(svg, _LEFT - 10, y + 4, shape_name(row.place.shape), anchor="end")
        _line(svg, _LEFT, y, _LEFT + _WIDTH, y, "line")
        # Ours last, on top of the others.
        for name in sorted(names, key=lambda name: (name == OURS, name != EAGER)):
            if name in row.shares:
                _dot(svg, place(row.shares[name].median), y, name, colours)
        _text(svg, _LEFT + _WIDTH + 10, y + 4, f"{row.shares[OURS].median:.2f}")


def _dot(svg: ElementTree.Element, x: float, y: float, name: str, colours: dict[str, str]) -> None:
    dot = ElementTree.SubElement(svg, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="5.5" if name == OURS else "4")
    if name == OURS:
        dot.set("class", "ours")
    else:
        dot.set("fill", colours[name])
    ElementTree.SubElement(dot, "title").text = name


def _line(svg: ElementTree.Element, x: float, y: float, to_x: float, to_y: float, kind: str) -> None:
    ends = {"x1": f"{x:.1f}", "y1": f"{y:.1f}", "x2": f"{to_x:.1f}", "y2": f"{to_y:.1f}"}
    ElementTree.SubElement(svg, "line", {**ends, "class": kind})


def _text(
    svg: ElementTree.Element, x: float, y: float, text: str, kind: str | None = None, anchor: str | None = None
) -> None:
    element = ElementTree.SubElement(svg, "text", x=f"{x:.1f}", y=f"{y:.1f}")
    if kind:
        element.set("class", kind)
    if anchor:
        element.set("text-anchor", anchor)
    element.text = text
