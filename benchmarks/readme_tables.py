"""Write the tables of figures in README.md from the results.

    .venv/bin/python benchmarks/readme_tables.py

A table is between `<!-- figures: NAME -->` and `<!-- /figures -->`. Several cases are given as their median and range.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import builder
import generate_page
import kernel_page
import measured_sources
import models_page
from kernel_page import Result
from model_titles import TITLES

from kernel_builder.measure import tables
from kernel_builder.measure.results import COMPILE, EAGER, OURS
from kernel_builder.plural import listed

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MACHINE = "h100"
COMPUTED = {
    "adaln": "modulated norms and gated residuals of diffusion transformers",
    "decode": "linear layers and attention of a decoding step",
    "geglu": "GELU- and SiLU-gated linear units",
    "rmsnorm": "RMSNorm, alone or after adding a residual",
    "rope3d": "rotary embeddings, on three axes or by tables, with q/k norm",
}
# Those of docs/models.md and docs/figures.md that say most in one row.
MODELS = ("ltx-2464", "wan-32760", "flux-4608", "qwen3-decode")
FIGURES = ("downloads", "nothing-changed", "equal-bytes")


def fill(readme: str) -> str:
    """Return the text of README.md with its tables as the results have them.

    Raises:
        ValueError: If it does not have the markers of each table once.
    """
    builder_report = json.loads((ROOT / "benchmarks/results/builder.json").read_text())
    parts = {
        "kernels": kernels(kernel_page.read_results()),
        "models": models(models_page.read_results()),
        "generate": generate(generate_page.read_results()),
        "builder": builder_figures(builder_report),
    }
    for name, text in parts.items():
        start, end = f"<!-- figures: {name} -->", "<!-- /figures -->"
        block = f"{start}\n\n{text}\n\n{end}"
        readme, number = re.subn(f"{start}.*?{end}", lambda _, block=block: block, readme, flags=re.DOTALL)
        if number != 1:
            raise ValueError(f"README.md must have {start} and {end} once, has them {number} times")
    return readme


def kernels(results: Sequence[Result]) -> str:
    """Return the table of kernels, and what its figures are of."""
    measured = [result for result in results if result.machine == MACHINE]
    untuned = kernel_page.untuned_shapes()
    table = [
        [
            "",
            "",
            "share of copy speed, forward",
            "backward",
            "best peer's time / ours, forward",
            "backward",
        ]
    ]
    for result in measured:
        rows = [row for row in result.report.rows if not kernel_page.is_untuned(row, untuned)]
        passes = [
            [row for row in rows if row.point.passes == "forward"],
            [row for row in rows if row.point.passes != "forward"],
        ]
        shares = [spread(row.shares[OURS].median for row in part if OURS in row.shares) for part in passes]
        peers = [spread(peer[1].median for row in part if (peer := row.best_peer())) for part in passes]
        name = result.kernel
        table.append([f"[{name}](kernels/{name})", COMPUTED[name], *shares, *peers])
    names = list(dict.fromkeys(name for result in measured for name in tables.implementations(result.report.rows)))
    shown = {OURS: "", EAGER: "eager PyTorch", COMPILE: "`torch.compile`"}
    peers_named = [shown.get(name, f"`{name}`") for name in names if name != OURS]
    on = tables.device(measured[0].report)
    return "\n".join(
        [
            tables.as_markdown(table),
            "",
            f"Median and range over the sizes of models, bfloat16, {on}, cold caches. [Copy speed](docs/kernels.md) "
            f"is that of a copy of as many bytes in the same run. The peers are {listed(peers_named)}; the fastest "
            f"counts. {_commits(measured)}.",
        ]
    )


def _commits(results: Sequence[Result]) -> str:
    """Return the commit that most results are of, and those of the others."""
    commits = {result.kernel: f"`{_commit(result)}`" for result in results}
    usual = statistics.mode(commits.values())
    others = [f"of {kernel} {commit}" for kernel, commit in commits.items() if commit != usual]
    return f"Commit {', '.join([usual, *others])}"


def _of_blocks(report: Mapping[str, Any]) -> str:
    """Return the commit of the measured blocks."""
    return f"Commit `{_recorded_commit(report.get('packages', {}).get('blocks', {}))}`"


def _commit(result: Result) -> str:
    return _recorded_commit(result.report.build)


def _recorded_commit(build: Mapping[str, Any]) -> str:
    kernel = (build.get("provenance") or {}).get("kernel") or {}
    return str(kernel.get("commit", "unknown"))[:12] + (" with changes" if kernel.get("dirty") else "")


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return the median of values and their range, or `-` without values."""
    ordered = sorted(values)
    if not ordered:
        return "-"
    median, least, most = (f"{value:.{digits}f}" for value in (statistics.median(ordered), ordered[0], ordered[-1]))
    return f"{median} ({least} to {most})"


def models(report: Mapping[str, Any]) -> str:
    """Return the table of models, and the ratios of its columns."""
    compiled = ("compile", "reduce-overhead")
    table = [["", EAGER, "better mode of `torch.compile`", "accelerated", "with graphs"]]
    for case in MODELS:
        times = report["time"][case]["milliseconds"]
        best = min((times[variant] for variant in compiled if variant in times), default=None)
        shown = [times.get(EAGER), best, times.get("accelerated"), times.get("graphs")]
        table.append([TITLES[case], *("-" if time is None else f"{time:.1f}" for time in shown)])
    with_graphs = models_page.beside_the_fastest(report)
    machine = report["machine"]
    first = {
        variant: [
            calls[variant] for result in report["time"].values() if variant in (calls := result["first-call-seconds"])
        ]
        for variant in ("accelerated", COMPILE)
    }
    releases = listed(
        [f"Torch {machine['torch']}", *(f"{name} {machine[name]}" for name in ("diffusers", "transformers"))]
    )
    return "\n".join(
        [
            tables.as_markdown(table),
            "",
            f"Milliseconds of one forward, {machine['device']}, bfloat16, {releases}. With graphs, a forward takes "
            f"{spread(with_graphs.values())} of the time of the fastest of eager and `torch.compile`, median and range "
            f"of {len(with_graphs)} cases. The first accelerated call takes {spread(first['accelerated'], 1)} s, the "
            f"first compiled one {spread(first[COMPILE], 0)} s. {_of_blocks(report)}.",
        ]
    )


def generate(report: Mapping[str, Any]) -> str:
    """Return a sentence on the speed of `generate`."""
    case = report["cases"]["llama-8b"]
    graphs, compiled, eager = (f"{generate_page.speed(case, name):,.0f}" for name in ("graphs", "compiled", EAGER))
    return (
        f"{generate_page.title('llama-8b', case)}: {graphs} tokens a second; {compiled} by transformers' compiled "
        f"static cache, {eager} eager, {case['floor-tokens-per-second']:,.0f} at the copy speed of the weights "
        f"({report['machine']['device']}; `benchmarks/generate.py --case llama-8b --json g.json`). "
        f"{_of_blocks(report)}."
    )


def builder_figures(report: Mapping[str, Any]) -> str:
    """Return the table of the builder's figures, and the machine that they were measured on."""
    figures = builder.PAGE.rows(report)
    rows = [figures[name] for name in FIGURES]
    table = [["figure", "target", "measured", ""], *([r.title, r.target or "-", r.measured, r.verdict] for r in rows)]
    oldest = measured_sources.oldest_commit(report["figures"])[:12]
    on = builder.describe_machine(report["machine"])
    return "\n".join([tables.as_markdown(table), "", f"{on} Commit `{oldest}` and later."])


if __name__ == "__main__":
    README.write_text(fill(README.read_text()))
