"""The section on `generate` of docs/models.md, and its plot, from the results of `benchmarks/generate.py`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kernel_builder.measure import plot

RESULTS = Path(__file__).resolve().parent / "results" / "generate.h200.json"
PLOT = "models/generate.h200.svg"
_TITLES = {"llama-8b": "Llama 3.1 8B", "qwen3-4b": "Qwen3 4B", "gemma3-4b": "Gemma 3 4B", "qwen3-moe": "Qwen3-30B-A3B"}
_HEADINGS = {"eager": "eager", "accelerated": "accelerated", "compiled": "compiled", "graphs": "accelerated, graphs"}
# With graphs / compiled.
_TARGETS = {"llama-8b": 1.7, "qwen3-4b": 1.5, "gemma3-4b": 1.3, "qwen3-moe": 1.3}


def read_results() -> dict[str, Any]:
    """Return the report, the parsed JSON; an empty one if nothing was measured."""
    report: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    return report


def section(report: Mapping[str, Any]) -> str:
    """Return the tables of the section."""
    cases = {name: report["cases"][name] for name in _TITLES if name in report["cases"]}
    if not cases:
        return "Not measured yet."
    machine = report["machine"]
    parts = [
        f"Measured on {machine['device']}; Torch {machine['torch']}, transformers {machine['transformers']}; "
        f"{report['new-tokens']} new tokens.",
        "<!-- generate-sources -->",
        "\n".join(_targets(cases)),
        "\n".join(_speeds(cases)),
    ]
    return "\n\n".join(parts)


def speed(case: Mapping[str, Any], variant: str, kind: str = "greedy") -> float | None:
    measured = case.get(variant, {}).get(kind)
    return float(measured["tokens-per-second"]) if measured else None


def title(name: str, case: Mapping[str, Any]) -> str:
    layers, published = case["layers"], case["published-layers"]
    shortened = "" if layers == published else f", {layers} of {published} layers"
    return f"{_TITLES[name]}{shortened}, batch {case['batch']}"


def _targets(cases: Mapping[str, Any]) -> Iterator[str]:
    yield "| figure | target | measured | |"
    yield "| --- | --- | --- | --- |"
    for name, case in cases.items():
        of, graphs = title(name, case), speed(case, "graphs")
        yield _target(f"{of}: with graphs / compiled", _TARGETS[name], _ratio(graphs, speed(case, "compiled")))
    for name, case in cases.items():
        of, graphs = title(name, case), speed(case, "graphs")
        if name == "llama-8b":
            yield _target(f"{of}: with graphs / floor", 0.80, _ratio(graphs, case["floor-tokens-per-second"]))
    for name, case in cases.items():
        ratio = _ratio(speed(case, "graphs", "sampling"), speed(case, "graphs"))
        yield _target(f"{title(name, case)}: sampling / greedy", 0.95, ratio)
    for name, case in cases.items():
        ratio = _ratio(speed(case, "accelerated"), speed(case, "eager"))
        yield _target(f"{title(name, case)}: without graphs / eager", 1.4, ratio)
    seconds = [
        case["graphs"]["seconds-to-token"]["0"] for case in cases.values() if "seconds-to-token" in case["graphs"]
    ]
    if seconds:
        verdict = "met" if max(seconds) <= 3 else "missed"
        yield f"| from `accelerate` to the first token | at most 3 s | {max(seconds):.1f} s | {verdict} |"
    for name, case in cases.items():
        if "accuracy" in case:
            yield _accuracy(f"{_TITLES[name]}, {case['accuracy']['layers']} layers", case["accuracy"])
    compared = [case["graphs"]["beside-eager"] for case in cases.values() if "beside-eager" in case["graphs"]]
    if compared:
        explained = "all" if all(each["explained"] for each in compared) else "not all"
        verdict = "met" if explained == "all" else "missed"
        yield (
            "| tokens that differ from eager's where the two best logits differ by more than the rounding | none | "
            f"{explained} first differences within it | {verdict} |"
        )


def _accuracy(of: str, accuracy: Mapping[str, Any]) -> str:
    ratio, unexplained = accuracy["rms-error"]["graphs"] / accuracy["rms-error"]["eager"], accuracy["unexplained"]
    verdict = "met" if ratio <= 1.1 and unexplained == 0 else "missed"
    measured = f"{ratio:.2f}; {unexplained} of {accuracy['tokens']:,} tokens differ by more than the rounding"
    return f"| {of}: error against float32, with graphs / eager | at most 1.1 | {measured} | {verdict} |"


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value / other


def _target(what: str, least: float, ratio: float | None) -> str:
    if ratio is None:
        return f"| {what} | at least {least} | - | not measured |"
    return f"| {what} | at least {least} | {ratio:.2f} | {'met' if ratio >= least else 'missed'} |"


def _speeds(cases: Mapping[str, Any]) -> Iterator[str]:
    headings = [*_HEADINGS.values(), "the same, sampling", "floor", "second token: compiled, graphs"]
    yield f"| tokens per second | {' | '.join(headings)} |"
    yield "| --- " * (len(headings) + 1) + "|"
    for name, case in cases.items():
        speeds = [speed(case, variant) for variant in _HEADINGS]
        speeds += [speed(case, "graphs", "sampling"), case["floor-tokens-per-second"]]
        cells = ["-" if speed is None else f"{speed:,.1f}" for speed in speeds]
        seconds = [case.get(variant, {}).get("seconds-to-token") for variant in ("compiled", "graphs")]
        times = ", ".join("-" if tokens is None else f"{tokens['1']:.1f} s" for tokens in seconds)
        yield f"| {title(name, case)} | {' | '.join(cells)} | {times} |"


# The Okabe-Ito palette, which colour-blind readers can tell apart.
_BARS = {"eager": "#bbbbbb", "accelerated": "#56b4e9", "compiled": "#d55e00", "graphs": "black"}


def draw_svg(report: Mapping[str, Any]) -> bytes:
    """Return the plot as an SVG file: for each model the speed of each variant, as a share of the floor."""
    cases = {name: report["cases"][name] for name in _TITLES if name in report["cases"]}
    figure = Figure(figsize=(8.5, 1.2 + 0.8 * len(cases)), layout="constrained")
    axis = figure.subplots()
    height = 0.8 / len(_BARS)
    for number, (variant, colour) in enumerate(_BARS.items()):
        placed = []
        for row, case in enumerate(cases.values()):
            share = _ratio(speed(case, variant), case["floor-tokens-per-second"])
            if share is not None:
                placed.append((row + number * height, share))
        if placed:
            rows, shares = zip(*placed, strict=True)
            bars = axis.barh(rows, shares, 0.9 * height, color=colour, label=_HEADINGS[variant])
            axis.bar_label(bars, [f"{share:.2f}" for share in shares], padding=3, fontsize="small")
    axis.set_yticks([row + 1.5 * height for row in range(len(cases))], [title(*case) for case in cases.items()])
    axis.invert_yaxis()
    axis.set_xlabel("tokens per second; 1 is reading the weights once a token at copy speed")
    axis.margins(x=0.08)
    axis.spines[["top", "right"]].set_visible(False)
    if cases:
        figure.suptitle(f"generate, greedy, {report['machine']['device']}", fontsize="medium")
        figure.legend(loc="outside lower center", ncols=len(_BARS))
    with plot.reproducible(PLOT):
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
