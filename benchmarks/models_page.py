"""Write docs/models.md from the results of `benchmarks/models.py`.

    .venv/bin/python benchmarks/models_page.py

The plot, and what has changed since the measurement, are in the site only: `make docs` writes them where the page has
`<!-- plot -->` and `<!-- sources -->`.
"""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import generate_page
from matplotlib.figure import Figure
from measured_sources import described
from model_titles import TITLES

from kernel_builder.measure import plot

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "models-h200.json"
CLASSES = ROOT / "benchmarks" / "results" / "model-classes.json"
PAGE = ROOT / "docs" / "models.md"
PLOT = "models/models.h200.svg"
_PROSE = ROOT / "benchmarks" / "models_page.md"

Times = Mapping[str, float]
"""Variant -> milliseconds of one forward."""

_LONG = ("ltx-7056", "wan-7800", "wan-32760", "qwen3-8192")  # 7,000 tokens and more


# GPU milliseconds of an H200 beside GEMM and attention with the kernels of adaln, rmsnorm and rope3d called by hand,
# before there were kernels for q and k norms with rotary embedding, sums without gates, and gated activations.
_LEFT_BY_HAND = {"ltx-2464": 3.5, "wan-7800": 9.7, "qwen3-128": 0.65}


@dataclass(frozen=True)
class Target:
    """A figure's row in the table of targets. `met` is None if nothing was measured."""

    what: str
    wanted: str
    measured: str
    met: bool | None


def read_results() -> dict[str, Any]:
    """Return the report, the parsed JSON."""
    report: dict[str, Any] = json.loads(RESULTS.read_text())
    return report


def main_page(report: Mapping[str, Any]) -> str:
    """Return the page for a report, the parsed JSON."""
    machine = report["machine"]
    versions = f"Torch {machine['torch']}, diffusers {machine['diffusers']}, transformers {machine['transformers']}"
    verdicts = {True: "met", False: "missed", None: "not measured"}
    targets = [f"| {t.what} | {t.wanted} | {t.measured} | {verdicts[t.met]} |" for t in find_targets(report)]
    sections = {
        "kernels": "[kernels](kernels.md)",
        "machine": f"{machine['device']}; {versions}",
        "targets": "\n".join(["| figure | target | measured | |", "| --- | --- | --- | --- |", *targets]),
        "times": "\n".join(_times(report.get("time", {}))),
        "profile": "\n".join(_profiles(report.get("profile", {}))),
        "accuracy": "\n".join(_accuracy(report.get("accuracy", {}))),
        "classes": "\n".join(_classes(json.loads(CLASSES.read_text())["models"])),
        "others": "\n".join(_others(report)),
        "generate": generate_page.section(generate_page.read_results()),
    }
    page = _PROSE.read_text()
    for name, text in sections.items():
        page = page.replace(f"{{{name}}}", text)
    return page


def fill(page: str, report: Mapping[str, Any]) -> str:
    """Return docs/models.md with its plot, and with what has changed since the measurement."""
    parts = {
        "<!-- plot -->": f"![The speed of a forward beside eager]({PLOT})",
        "<!-- generate-plot -->": f"![The speed of generate beside the floor]({generate_page.PLOT})",
        "<!-- sources -->": _sources(report),
        "<!-- generate-sources -->": _sources(generate_page.read_results()),
    }
    for marker, text in parts.items():
        if page.count(marker) != 1:
            raise ValueError(f"docs/models.md must have {marker} once")
        page = page.replace(marker, text)
    return page


def _sources(report: Mapping[str, Any]) -> str:
    lines = [
        f"- {name}: {described(ROOT / 'kernels' / name, package['variant'], package)}"
        for name, package in report.get("packages", {}).items()
    ]
    unknown = "The results do not record the commit of the kernels, so whether these have changed since is unknown."
    return "\n".join(lines) or unknown


def ratios(report: Mapping[str, Any], first: str, *others: str) -> dict[str, float]:
    """Return case -> time of `first` divided by the least of the others' that were measured."""
    divided = {}
    for case, result in report.get("time", {}).items():
        times = result["milliseconds"]
        measured = [times[other] for other in others if other in times]
        if first in times and measured:
            divided[case] = times[first] / min(measured)
    return divided


def beside_the_fastest(report: Mapping[str, Any]) -> dict[str, float]:
    """Return case -> time with graphs divided by the fastest of eager and the modes of compile.

    Cases that were not compiled are left out: eager alone is no measure.
    """
    compiled = ratios(report, "graphs", "compile", "reduce-overhead")
    fastest = ratios(report, "graphs", "eager", "compile", "reduce-overhead")
    return {case: ratio for case, ratio in fastest.items() if case in compiled}


def _mean_target(what: str, ratios: dict[str, float], mean: float, most: float | None = None) -> Target:
    wanted = f"mean at most {mean}" + (f", each at most {most}" if most else "")
    if not ratios:
        return Target(what, wanted, "-", None)
    value, worst = statistics.geometric_mean(ratios.values()), max(ratios, key=lambda case: ratios[case])
    median = statistics.median(ratios.values())
    measured = f"{value:.3f}, median {median:.3f}; most {ratios[worst]:.3f} ({TITLES[worst]})"
    return Target(what, wanted, measured, value <= mean and (most is None or ratios[worst] <= most))


def _each_target(what: str, ratios: dict[str, float], most: float, unit: str = "") -> Target:
    wanted = f"each at most {most}{unit}"
    if not ratios:
        return Target(what, wanted, "-", None)
    worst = max(ratios, key=lambda case: ratios[case])
    over = sum(ratio > most for ratio in ratios.values())
    count = f", {over} of {len(ratios)} above" if over else ""
    return Target(what, wanted, f"{ratios[worst]:.2f}{unit} ({TITLES[worst]}){count}", not over)


def find_targets(report: Mapping[str, Any]) -> Iterator[Target]:
    """Return the targets and what was measured for each."""
    long = {case: ratio for case, ratio in ratios(report, "accelerated", "compile").items() if case in _LONG}
    first = {
        case: result["first-call-seconds"]["accelerated"]
        for case, result in report.get("time", {}).items()
        if "accelerated" in result["first-call-seconds"]
    }
    left = {
        case: report["profile"][case]["accelerated"]["other"] / before
        for case, before in _LEFT_BY_HAND.items()
        if case in report.get("profile", {})
    }
    trained = {case: times["accelerated"] / times["eager"] for case, times in report.get("train", {}).items()}
    errors = {
        case: max(differences[variant] for variant in ("accelerated", "graphs") if variant in differences)
        / differences["eager"]
        for case, differences in report.get("accuracy", {}).items()
    }
    yield _mean_target("with graphs / the fastest of eager and compile", beside_the_fastest(report), 0.90, 0.98)
    yield _mean_target("without graphs / eager", ratios(report, "accelerated", "eager"), 0.65)
    yield _each_target("without graphs / compile, 7,000 tokens and more", long, 0.97)
    yield _each_target(
        "compile on top of accelerated / compile", ratios(report, "compile-accelerated", "compile"), 1.01
    )
    yield _each_target("accelerating and the first call", first, 3, " s")
    yield _each_target("GPU time beside GEMM and attention / with the first kernels, put in by hand", left, 0.5)
    yield _each_target("training step: accelerated / eager", trained, 0.8)
    yield _pipeline_target(report.get("pipeline", {}).get("ltx-pipeline"))
    yield _each_target("difference from float32: accelerated / eager", errors, 1.1)


def _pipeline_target(seconds: Times | None) -> Target:
    what, wanted = "LTX-Video pipeline, 49 frames, 30 steps: eager / accelerated", "at least 1.35"
    if not seconds:
        return Target(what, wanted, "-", None)
    best = max(seconds["eager"] / seconds[variant] for variant in ("accelerated", "graphs") if variant in seconds)
    return Target(what, wanted, f"{best:.2f}", best >= 1.35)


_HEADINGS = {
    "eager": "eager",
    "compile": "compile",
    "reduce-overhead": "reduce-overhead",
    "accelerated": "accelerated",
    "graphs": "accelerated, graphs",
    "compile-accelerated": "compile on accelerated",
}


def _times(results: Mapping[str, Any]) -> Iterator[str]:
    yield "| model | " + " | ".join(_HEADINGS.values()) + " | first call: eager, compile, accelerated |"
    yield "| --- " * (len(_HEADINGS) + 2) + "|"
    for case in (case for case in TITLES if case in results):
        times, first = results[case]["milliseconds"], results[case]["first-call-seconds"]
        cells = [f"{times[variant]:.1f}" if variant in times else "-" for variant in _HEADINGS]
        shown = ("eager", "compile", "accelerated")
        seconds = [f"{first[variant]:.1f} s" if variant in first else "-" for variant in shown]
        yield f"| {TITLES[case]} | {' | '.join(cells)} | {', '.join(seconds)} |"


def _profiles(results: Mapping[str, Any]) -> Iterator[str]:
    yield "| model | | GEMM | attention | other | launches |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for case in (case for case in TITLES if case in results):
        for variant in (variant for variant in _HEADINGS if variant in results[case]):
            split = results[case][variant]
            parts = " | ".join(f"{split[part]:.1f}" for part in ("gemm", "attention", "other"))
            yield f"| {TITLES[case]} | {_HEADINGS[variant]} | {parts} | {split['launches']} |"


def _accuracy(results: Mapping[str, Any]) -> Iterator[str]:
    yield "| model | eager | compile | accelerated | accelerated, graphs |"
    yield "| --- | --- | --- | --- | --- |"
    for case in (case for case in TITLES if case in results):
        differences = results[case]
        cells = [
            f"{differences[name]:.4f}" if name in differences else "-" for name in list(_HEADINGS) if name in _COMPARED
        ]
        yield f"| {TITLES[case]} | {' | '.join(cells)} |"


_COMPARED = ("eager", "compile", "accelerated", "graphs")


def _classes(models: Mapping[str, Any]) -> Iterator[str]:
    yield "| class | replaced | left | error, float32 | error, bfloat16 | seconds |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for model in models.values():
        counts: dict[str, int] = {}
        for _, does, count in model["replaced"]:
            for part in does.split("; "):
                counts[part] = counts.get(part, 0) + count
        replaced = ", ".join(f"{count} x {does}" for does, count in counts.items())
        left = "; ".join(f"{count} x {name}: {reason}" for name, reason, count in model["left"]) or "-"
        errors = [f"{ours / own:.2f}" for own, ours in model["errors"].values()]
        yield f"| {model['class']} | {replaced} | {left} | {' | '.join(errors)} | {model['seconds']:.2f} |"


def _others(report: Mapping[str, Any]) -> Iterator[str]:
    yield "| | eager | accelerated | accelerated, graphs |"
    yield "| --- | --- | --- | --- |"
    for case, times in report.get("train", {}).items():
        yield f"| training step, {TITLES[case]} | {times['eager']:.1f} ms | {times['accelerated']:.1f} ms | - |"
    for seconds in report.get("pipeline", {}).values():
        cells = [
            f"{seconds[variant]:.2f} s" if variant in seconds else "-" for variant in _COMPARED if variant != "compile"
        ]
        yield f"| LTX-Video pipeline, 49 frames of 704x512, 30 steps | {' | '.join(cells)} |"


# --- the plot --------------------------------------------------------------------------------------------------------

# The Okabe-Ito palette, which colour-blind readers can tell apart.
_BARS = {"eager": "#bbbbbb", "compile": "#d55e00", "reduce-overhead": "#e69f00", "graphs": "black"}


def draw(report: Mapping[str, Any]) -> Figure:
    """Return the plot: for each model the speed of each variant, where eager is 1."""
    results = report.get("time", {})
    cases = [case for case in TITLES if case in results]
    figure = Figure(figsize=(8.5, 0.9 + 0.75 * len(cases)), layout="constrained")
    axis = figure.subplots()
    height = 0.8 / len(_BARS)
    for number, (variant, colour) in enumerate(_BARS.items()):
        placed = [
            (row + number * height, times["eager"] / times[variant])
            for row, times in enumerate(results[case]["milliseconds"] for case in cases)
            if variant in times
        ]
        if placed:
            rows, speeds = zip(*placed, strict=True)
            bars = axis.barh(rows, speeds, 0.9 * height, color=colour, label=_HEADINGS[variant])
            axis.bar_label(bars, [f"{speed:.2f}" for speed in speeds], padding=3, fontsize="small")
    axis.set_yticks([row + 1.5 * height for row in range(len(cases))], [TITLES[case] for case in cases])
    axis.invert_yaxis()
    axis.set_xlabel("speed of one forward; eager is 1")
    axis.margins(x=0.08)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Forwards per second beside eager PyTorch, {report['machine']['device']}", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=len(_BARS))
    return figure


def draw_svg(report: Mapping[str, Any]) -> bytes:
    """Return the plot as an SVG file."""
    with plot.reproducible(PLOT):
        file = io.BytesIO()
        draw(report).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


if __name__ == "__main__":
    PAGE.write_text(main_page(read_results()))
