"""A roofline of timed shapes as SVG: memory throughput against the operations per byte, beside the device's limit."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 260, 48, 36
_COLORS = {"candidate": "#c2410c", "eager": "#2563eb", "compile": "#15803d", "max-autotune": "#7e22ce"}
_ROOF = "#78716c"
_MOST = 1e30  # of a figure; larger ones and NaN are no measurements


def roofline(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return the drawing of the cases of verdicts; empty if none has a limit.

    The y axis has GB/s: bytes that must move, divided by the time. The roof is the copy speed, and falls where the
    operations take longer. Shapes without counted operations are at the left edge.
    """
    cases = [case for case in cases if _is_timed(case)]
    if not cases:
        return ""
    intensities = [case["operations"] / case["bytes"] for case in cases]
    memory = max(float(case["limit"]["gigabytes-per-second"]) for case in cases)
    matrix = max(float(case["limit"].get("gigaflops", 0.0)) for case in cases)
    points = [
        (intensity, case["bytes"] / milliseconds * 1e-6, name, f"{name}, {case['shapes']}: {milliseconds:.4g} ms")
        for intensity, case in zip(intensities, cases, strict=True)
        for name, milliseconds in case["milliseconds"].items()
        if name in _COLORS and milliseconds > 0
    ]
    ridge = matrix / memory if matrix else 1.0
    known = [intensity for intensity in intensities if intensity > 0]
    xs = _Scale(min([ridge, *known]) / 4, max([ridge, *known]) * 4, _LEFT + 24, _WIDTH - 8)
    heights = [height for _, height, _, _ in points] + [memory] + ([matrix / xs.high] if matrix else [])
    ys = _Scale(min(heights) / 2, max(heights) * 2, _HEIGHT - _BOTTOM, 12)
    roof = [(float(_LEFT), ys.at(memory)), (xs.at(min(ridge, xs.high) if matrix else xs.high), ys.at(memory))]
    roof += [(xs.at(xs.high), ys.at(matrix / xs.high))] if matrix else []
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in roof)
    drawn = [f'<polyline points="{path}" fill="none" stroke="{_ROOF}" stroke-width="2"/>']
    for intensity, case in zip(intensities, cases, strict=True):
        x, y = xs.at(intensity), ys.at(case["bytes"] / case["limit"]["milliseconds"] * 1e-6)
        drawn.append(f'<path d="M{x - 6:.1f} {y:.1f}h12" stroke="{_ROOF}" stroke-width="2"/>')
    for intensity, height, name, text in points:
        title = f"<title>{html.escape(text)}</title>"
        place = f'cx="{xs.at(intensity):.1f}" cy="{ys.at(height):.1f}"'
        drawn.append(f'<circle {place} r="4" fill="{_COLORS[name]}" fill-opacity="0.75">{title}</circle>')
    drawn += [_label(_LEFT - 4, ys.at(tick), f"{tick:g}", "end") for tick in ys.ticks()]
    drawn += [_label(xs.at(tick), _HEIGHT - 26, f"{tick:g}", "middle") for tick in xs.ticks() if known]
    drawn += [_label(_LEFT + 8, _HEIGHT - 26, "0", "middle")] if 0 in intensities else []
    drawn += [_label(_WIDTH / 2, _HEIGHT - 8, "operations per byte", "middle"), _label(4, 5, "GB/s", "start")]
    names = [name for name in _COLORS if any(name == point[2] for point in points)]
    legend = [(name, _COLORS[name]) for name in names] + [("limit", _ROOF)]
    for number, (name, color) in enumerate(legend):
        drawn.append(_label(_LEFT + 24 + 74 * number, 5, name, "start", color))
    frame = f'<path d="M{_LEFT} 12V{_HEIGHT - _BOTTOM}H{_WIDTH - 8}" fill="none" stroke="#a8a29e"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="roofline">'
    return f"{head}{frame}{''.join(drawn)}</svg>"


class _Scale:
    """A logarithmic axis from `low` to `high`; smaller values are at a place of their own before it."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self._start, self._end = low, high, start, end

    def at(self, value: float) -> float:
        if value < self.low:
            return _LEFT + 8.0
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        return [10.0**power for power in powers][:: max(1, len(powers) // 6)]


def _label(x: float, y: float, text: str, anchor: str, color: str = "#44403c") -> str:
    place = f'x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}" fill="{color}"'
    return f'<text {place} font-size="11" font-family="sans-serif">{html.escape(text)}</text>'


def _is_timed(case: Any) -> bool:
    """Return whether a case, which may be of an untrusted file, has all figures."""
    try:
        limit = case["limit"]
        positive = [case["bytes"], limit["milliseconds"], limit["gigabytes-per-second"]]
        figures = [*positive, case["operations"], limit.get("gigaflops", 0), *case["milliseconds"].values()]
        return min(positive) > 0 and all(type(each) in (int, float) and 0 <= each < _MOST for each in figures)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
