"""The results of benchmarks/models.py and benchmarks/generate.py: ratios, targets and plots for docs/models.md."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from builder_results import Row
from matplotlib.figure import Figure

# The Okabe-Ito palette, which color-blind readers can tell apart.
_PALETTE = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#d55e00", "#f0e442")
TITLES = {
    "ltx-2464": "LTX-Video, 2,464 tokens",
    "ltx-7056": "LTX-Video, 7,056 tokens",
    "wan-7800": "Wan 2.1 1.3B, 7,800 tokens",
    "wan-32760": "Wan 2.1 1.3B, 32,760 tokens",
    "qwen3-128": "Qwen3-8B, prefill of 128",
    "qwen3-8192": "Qwen3-8B, prefill of 8,192",
    "qwen3-decode": "Qwen3-8B, one token, cache of 1,024",
    "flux-4608": "Flux.1, 1024x1024",
    "qwen-image-4352": "Qwen-Image, 1024x1024",
    "qwen3-moe-1024": "Qwen3-MoE with 8 layers, prefill of 1,024",
    "qwen3-vl-1152": "Qwen3-VL-4B, an image of 1024x1024 and text",
    "gemma3n-1024": "Gemma 3n E2B, prefill of 1,024",
    "z-image-4096": "Z-Image, 1024x1024",
    "cogvideox-9450": "CogVideoX 5B, 7x60x90",
    "siglip-8": "SigLIP so400m, 8 images",
}
TRAINING_TITLES = {"llama-1b": "Llama 3.2 1B", "qwen2-1.5b": "Qwen2.5 1.5B"}
TRAINING = ("eager", "compile", "liger", "accelerated", "compile on accelerated", "accelerated, no logits")
HEADINGS = {
    "eager": "eager",
    "compile": "compile",
    "reduce-overhead": "reduce-overhead",
    "accelerated": "accelerated",
    "blocks": "blocks",
    "graphs": "graphs",
    "compile-accelerated": "compile on accelerated",
}
GENERATE_TITLES = {
    "llama-8b": "Llama 3.1 8B",
    "qwen2-1.5b": "Qwen2.5 1.5B",
    "qwen3-4b": "Qwen3 4B",
    "gemma3-4b": "Gemma 3 4B",
    "qwen3-moe": "Qwen3-30B-A3B",
}
_GENERATE_TARGETS = {  # the least speed with graphs, divided by these
    "llama-8b": {"compiled": 1.7, "floor": 0.85},
    "qwen2-1.5b": {"floor": 0.60},
    "qwen3-4b": {"compiled": 1.5},
    "gemma3-4b": {"compiled": 1.3},
    "qwen3-moe": {"compiled": 1.3},
}


def ratios(report: Mapping[str, Any], first: str, *others: str) -> dict[str, float]:
    """Return case -> time of `first` divided by the least of the others' that were measured."""
    divided = {}
    for case, result in report["time"].items():
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


def model_targets(report: Mapping[str, Any], together: Mapping[str, Any], trained: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the targets of one forward and of training; cases of `together` were timed in one process."""
    first = {
        variant: {
            case: of[variant]
            for case, result in report["time"].items()
            if variant in (of := result["first-call-seconds"])
        }
        for variant in ("accelerated", "blocks", "graphs")
    }
    compiled = ratios(report, "compile-accelerated", "compile")
    compiled |= {case: times["compile-accelerated"] / times["compile"] for case, times in together.items()}
    beside_eager = ratios(report, "accelerated", "eager")
    beside_compile = ratios(report, "accelerated", "compile")
    yield _average("with graphs / the fastest of eager and compile", "median", beside_the_fastest(report), 0.90, 1.0)
    yield _average("without graphs / eager", "mean", beside_eager, 0.62)
    yield _each("without graphs / compile", {"cogvideox-9450": beside_compile["cogvideox-9450"]}, 0.97)
    yield _each("without graphs / eager", {"siglip-8": beside_eager["siglip-8"]}, 0.90)
    yield _each("compile on top of accelerated / compile", compiled, 1.02)
    yield _each("the first call, by default", first["accelerated"], 10, " s")
    yield _each('the first call, with `scope="blocks"`', first["blocks"], 3, " s")
    yield _each("the first call, with graphs", first["graphs"], 3, " s")
    steps = {case: times["accelerated"] / times["eager"] for case, times in trained.items()}
    yield _each("training step: accelerated / eager", steps, 0.8)


def training_targets(cases: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the targets of training steps of language models."""
    for title, unit, most in (("time", "milliseconds", 0.95), ("memory", "gib", 1.0)):
        ratios = {name: case[TRAINING[-1]][unit] / case["liger"][unit] for name, case in cases.items()}
        yield _each(f"training step without logits / Liger: {title}", ratios, most)
    both = {name: case["compile on accelerated"] for name, case in cases.items() if "compile on accelerated" in case}
    if both:
        ratios = {name: of["milliseconds"] / cases[name]["compile"]["milliseconds"] for name, of in both.items()}
        yield _each("training step, compile on top of accelerated / compile", ratios, 1.02)


def _average(title: str, kind: str, ratios: Mapping[str, float], most: float, each: float | None = None) -> Row:
    """Return the row of a limit of the mean or the median, and of every ratio."""
    averages = {"mean": statistics.geometric_mean(ratios.values()), "median": statistics.median(ratios.values())}
    worst = max(ratios, key=lambda case: ratios[case])
    measured = (
        f"mean {averages['mean']:.3f}, median {averages['median']:.3f}; most {ratios[worst]:.3f} ({TITLES[worst]})"
    )
    met = averages[kind] <= most and (each is None or ratios[worst] <= each)
    return Row(title, f"{kind} at most {most}" + (f", each at most {each}" if each else ""), measured, met)


def _each(title: str, ratios: Mapping[str, float], most: float, unit: str = "") -> Row:
    worst = max(ratios, key=lambda case: ratios[case])
    over = sum(ratio > most for ratio in ratios.values())
    count = f", {over} of {len(ratios)} above" if over and len(ratios) > 1 else ""
    return Row(
        title,
        f"each at most {most}{unit}",
        f"{ratios[worst]:.{2 if unit else 3}f}{unit} ({(TITLES | TRAINING_TITLES | GENERATE_TITLES)[worst]}){count}",
        not over,
    )


def _at_least(title: str, least: float, ratio: float | None) -> Row:
    measured = "-" if ratio is None else f"{ratio:.2f}"
    return Row(title, f"at least {least}", measured, None if ratio is None else ratio >= least)


# --- generate --------------------------------------------------------------------------------------------------------


def speed(case: Mapping[str, Any], variant: str, kind: str = "greedy") -> float | None:
    """Return the tokens per second of a variant, or None if it was not measured."""
    measured = case.get(variant, {}).get(kind)
    return float(measured["tokens-per-second"]) if measured else None


def generate_title(name: str, case: Mapping[str, Any]) -> str:
    """Return the name of a case in tables."""
    layers, published = case["layers"], case["published-layers"]
    shortened = "" if layers == published else f", {layers} of {published} layers"
    return f"{GENERATE_TITLES[name]}{shortened}, batch {case['batch']}"


def generate_targets(cases: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the targets of `generate`."""
    for name, case in cases.items():
        others = {"compiled": speed(case, "compiled"), "floor": case["floor-tokens-per-second"]}
        for other, least in _GENERATE_TARGETS[name].items():
            ratio = _ratio(speed(case, "graphs"), others[other])
            yield _at_least(f"{GENERATE_TITLES[name]}: with graphs / {other}", least, ratio)
    sampling = {name: _ratio(speed(case, "graphs", "sampling"), speed(case, "graphs")) for name, case in cases.items()}
    yield _each_at_least("sampling / greedy", sampling, 0.95)
    eager = {name: _ratio(speed(case, "accelerated"), speed(case, "eager")) for name, case in cases.items()}
    yield _each_at_least("without graphs / eager", eager, 1.4)
    seconds = max(case["graphs"]["seconds-to-token"]["0"] for case in cases.values())
    yield Row("from `accelerate` to the first token", "at most 3 s", f"{seconds:.1f} s", seconds <= 3)
    accuracy = {name: case["accuracy"] for name, case in cases.items() if "accuracy" in case}
    layers = "/".join(sorted({str(measured["layers"]) for measured in accuracy.values()}))
    errors = {name: of["rms-error"]["graphs"] / of["rms-error"]["eager"] for name, of in accuracy.items()}
    yield _each(f"error against float32, {layers} layers: with graphs / eager", errors, 1.1)
    unexplained, tokens = (sum(of[key] for of in accuracy.values()) for key in ("unexplained", "tokens"))
    title = f"tokens that differ from eager's by more than the rounding, {layers} layers"
    yield Row(title, "none", f"{unexplained} of {tokens:,}", unexplained == 0)
    explained = all(case["graphs"].get("beside-eager", {"explained": True})["explained"] for case in cases.values())
    yield Row(
        "tokens that differ from eager's where the two best logits differ by more than the rounding",
        "none",
        f"{'all' if explained else 'not all'} first differences are within the rounding",
        explained,
    )


def _each_at_least(title: str, ratios: Mapping[str, float | None], least: float) -> Row:
    measured = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    worst = min(measured, key=lambda name: measured[name])
    under = sum(ratio < least for ratio in measured.values())
    count = f", {under} of {len(measured)} below" if under else ""
    shown = f"{measured[worst]:.2f} ({GENERATE_TITLES[worst]}){count}"
    return Row(title, f"each at least {least}", shown, not under)


def _ratio(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value / other


# --- plots -----------------------------------------------------------------------------------------------------------


def draw_models(report: Mapping[str, Any]) -> bytes:
    """Return a plot as an SVG file: for each model the speed of each variant, where eager is 1."""
    bars = ("eager", "compile", "reduce-overhead", "graphs")
    times = {title: report["time"][case]["milliseconds"] for case, title in TITLES.items() if case in report["time"]}
    speeds = {
        title: {HEADINGS[bar]: of["eager"] / of[bar] if bar in of else None for bar in bars}
        for title, of in times.items()
    }
    title = f"Forwards per second beside eager PyTorch, {report['machine']['device']}"
    return draw_bars(speeds, title, "speed of one forward; eager is 1")


def draw_generate(report: Mapping[str, Any]) -> bytes:
    """Return a plot as an SVG file: for each model the speed of each variant, as a share of the floor."""
    shares = {
        generate_title(name, case): {
            HEADINGS.get(variant, variant): _ratio(speed(case, variant), case["floor-tokens-per-second"])
            for variant in ("eager", "accelerated", "compiled", "graphs")
        }
        for name, case in report["cases"].items()
    }
    title = f"generate, greedy, {report['machine']['device']}"
    return draw_bars(shares, title, "tokens per second; 1 is reading the weights once a token at copy speed")


def draw_bars(groups: Mapping[str, Mapping[str, float | None]], title: str, label: str) -> bytes:
    """Return horizontal bars in groups as an SVG file; each group has the same names of bars."""
    names = list(next(iter(groups.values())))
    colors = ("#bbbbbb", *_PALETTE[: len(names) - 2], "black")
    figure = Figure(figsize=(8.5, 1.2 + 0.75 * len(groups)), layout="constrained")
    axis, height = figure.subplots(), 0.8 / len(names)
    for number, (name, color) in enumerate(zip(names, colors, strict=True)):
        values = [(row + number * height, group[name]) for row, group in enumerate(groups.values()) if group[name]]
        rows, lengths = zip(*values, strict=True)
        bars = axis.barh(rows, lengths, 0.9 * height, color=color, label=name)
        for text in axis.bar_label(bars, [f"{length:.2f}" for length in lengths], padding=3, fontsize="small"):
            text.set_in_layout(False)  # the margin has room for them, and measuring them takes a quarter of the time
    _finish(axis, list(groups), height * (len(names) - 1) / 2, label)
    figure.suptitle(title, fontsize="medium")
    figure.legend(loc="outside lower center", ncols=len(names))
    # Equal results give equal files: no date, and no random identifiers.
    with mpl.rc_context({"svg.hashsalt": "kernel-builder", "svg.fonttype": "none"}):
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _finish(axis: Any, labels: Sequence[str], offset: float, label: str) -> None:
    axis.set_yticks([row + offset for row in range(len(labels))], labels)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.margins(x=0.08)
    axis.spines[["top", "right"]].set_visible(False)
