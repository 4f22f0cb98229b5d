"""Writes the figures of README.md and docs/ from benchmarks/results.

    .venv/bin/python benchmarks/pages.py            write them
    .venv/bin/python benchmarks/pages.py --check    fail if a page differs from the results

A page has each block of figures between `<!-- figures: NAME -->` and `<!-- /figures -->`. So has its template,
templates/PAGE.jinja, which renders the blocks from the values that a function of this module returns.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import kernel_results
import model_results
import triton_results
from builder_results import builder_rows
from recording import RESULTS, ROOT

from kernel_builder.measure import tables
from kernel_builder.measure.results import COMPILE, EAGER, OURS
from kernel_builder.plural import listed

README_MACHINE = "h200"
README_KERNELS = {
    "adaln": "modulated norms and gated residuals of diffusion transformers",
    "decode": "linear layers and attention of a decoding step",
    "geglu": "GELU- and SiLU-gated linear units",
    "rmsnorm": "RMSNorm, alone or after adding a residual",
    "rope3d": "rotary embeddings, on three axes or by tables, with q/k norm",
}
README_MODELS = ("ltx-2464", "wan-7800", "qwen3-128", "qwen3-decode")
README_BUILDER = {"downloads": "the downloads", "nothing-changed": "the unchanged build"}

Values = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; a cell without a value is a dash."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    return kernel_results.as_markdown([list(head), *cells])


def targets(rows: Iterable[Any]) -> str:
    """Return the table of rows that have a title, a target, a measured value and a verdict."""
    head = ["figure", "target", "measured", ""]
    return table(head, [[row.title, row.target or None, row.measured, row.verdict] for row in rows])


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return the median of values and their range, or `-` without values."""
    ordered = sorted(values)
    if not ordered:
        return "-"
    median, least, most = (f"{value:.{digits}f}" for value in (statistics.median(ordered), ordered[0], ordered[-1]))
    return f"{median} ({least} to {most})"


@cache
def results(name: str) -> Any:
    """Return the parsed JSON of benchmarks/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


# --- README.md -------------------------------------------------------------------------------------------------------


def readme() -> Values:
    """Return the values of README.md."""
    builder, models, generate = results("builder"), results("models-h200"), results("generate.h200")
    training, triton_aot = results("training-h200"), results("triton-aot.h200")
    measured = [result for result in kernel_results.read_results() if result.machine == README_MACHINE]
    rows = builder_rows(builder["figures"])
    return {
        "builder": builder,
        "builder_rows": [rows[name] for name in README_BUILDER],
        "builder_commits": _commits(
            {title: builder["figures"][name]["commit"] for name, title in README_BUILDER.items()}
        ),
        "kernels": [[f"[{result.kernel}](kernels/{result.kernel})", *_kernel_row(result)] for result in measured],
        "kernels_device": tables.device(measured[0].report),
        "kernels_commits": _commits({result.kernel: result.report.build["commit"] for result in measured}),
        "peers": _peers(measured),
        "triton_aot": triton_aot,
        "triton_ratios": [row.measured for row in triton_results.rows(triton_aot)[:3]],
        "training": training,
        "trained": {
            "accelerated, no logits": "accelerated",
            "liger": f"Liger {training['machine']['liger-kernel']}",
            "compile": "`torch.compile`",
            "eager": "eager",
        },
        "models": models,
        "later_models": _later(models["time"], model_results.TITLES),
        "model_rows": [_model_row(models, case) for case in README_MODELS],
        "with_graphs": model_results.beside_the_fastest(models).values(),
        "first_calls": {
            variant: [
                of[variant] for result in models["time"].values() if variant in (of := result["first-call-seconds"])
            ]
            for variant in ("accelerated", "blocks", "graphs")
        },
        "generate": generate,
        "llama": generate["cases"]["llama-8b"],
    }


def _kernel_row(result: kernel_results.Result) -> list[str]:
    untuned = kernel_results.untuned_shapes()
    rows = [row for row in result.report.rows if not kernel_results.is_untuned(row, untuned)]
    passes = [[row for row in rows if (row.point.passes == "forward") == forward] for forward in (True, False)]
    shares = [spread(row.shares[OURS].median for row in part if OURS in row.shares) for part in passes]
    peers = [spread(peer[1].median for row in part if (peer := row.best_peer())) for part in passes]
    return [README_KERNELS[result.kernel], *shares, *peers]


def _peers(measured: Sequence[kernel_results.Result]) -> str:
    names = dict.fromkeys(name for result in measured for name in tables.implementations(result.report.rows))
    titles = {EAGER: "eager PyTorch", COMPILE: "`torch.compile`"}
    return listed([titles.get(name, f"`{name}`") for name in names if name != OURS])


def _commits(commits: Mapping[str, str]) -> str:
    """Return the commit that most results have, and the others' commits with their names."""
    usual = statistics.mode(commits.values())
    others = [f"`{commit}` for {name}" for name, commit in commits.items() if commit != usual]
    return ", ".join([f"`{usual}`", *others])


def _later(cases: Mapping[str, Any], titles: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the titles of the cases that were measured at another commit than the report's, by commit."""
    later: dict[str, list[str]] = {}
    for name, case in cases.items():
        if "commit" in case:
            later.setdefault(case["commit"], []).append(titles[name])
    return later


def _model_row(models: Mapping[str, Any], case: str) -> list[str | None]:
    times = models["time"][case]["milliseconds"]
    compiled = min((times[mode] for mode in ("compile", "reduce-overhead") if mode in times), default=None)
    shown = [times.get(EAGER), compiled, times.get("accelerated"), times.get("graphs")]
    return [model_results.TITLES[case], *(None if time is None else f"{time:.1f}" for time in shown)]


# --- docs ------------------------------------------------------------------------------------------------------------


def figures() -> Values:
    """Return the values of docs/figures.md."""
    builder = results("builder")
    return {"builder": builder, "rows": builder_rows(builder["figures"])}


def kernels() -> Values:
    """Return the values of docs/kernels.md."""
    measured = kernel_results.read_results()
    return {
        "outcomes": list(kernel_results.outcomes(measured)),
        "sections": [kernel_results.section(result) for result in measured],
    }


def models() -> Values:
    """Return the values of docs/models.md."""
    report, generate = results("models-h200"), results("generate.h200")
    training, trained = results("training-h200"), results("models-train-h200")
    together = results("models-together-h200")
    return {
        "report": report,
        "later_models": _later(report["time"], model_results.TITLES),
        "together": together,
        "trained": trained,
        "targets_of_models": list(model_results.model_targets(report, together["together"], trained["train"])),
        "titles": {case: title for case, title in model_results.TITLES.items() if case in report["time"]},
        "headings": model_results.HEADINGS,
        **_classes(results("model-classes")["models"]),
        "generate": generate,
        "later_generate": _later(generate["cases"], model_results.GENERATE_TITLES),
        "training": training,
        "training_titles": model_results.TRAINING_TITLES,
        "training_variants": model_results.TRAINING,
        "targets_of_training": list(model_results.training_targets(training["cases"])),
        "targets_of_generate": list(model_results.generate_targets(generate["cases"])),
        "title": model_results.generate_title,
        "speed": model_results.speed,
    }


def _classes(classes: Sequence[Mapping[str, Any]]) -> Values:
    errors = {
        dtype: {entry["class"]: entry["errors"][dtype][1] / entry["errors"][dtype][0] for entry in classes}
        for dtype in ("float32", "bfloat16")
    }
    return {
        "classes": len(classes),
        "replaced": sum(entry["replaced"] for entry in classes),
        "class_errors": {dtype: ratios.values() for dtype, ratios in errors.items()},
        "large_errors": {name: ratio for name, ratio in errors["bfloat16"].items() if ratio > 1.1},
    }


def compatibility() -> Values:
    """Return the values of docs/compatibility.md."""
    community = results("community")
    variants = [variant for project in community["projects"].values() for variant in project["variants"].values()]
    return {
        "community": community,
        "notes": kernel_results.read_toml("community_notes.toml"),
        "kinds": {
            title: [v for v in variants if (v["backend"] if v["compiled"] else "") == backend]
            for title, backend in (("CUDA", "cuda"), ("CPU", "cpu"), ("Python-only", ""))
        },
        "loadable": [v for v in variants if v["status"] == "built" and v["backend"] in ("cuda", "cpu")],
    }


def skills() -> Values:
    """Return the values of docs/skills.md."""
    agents = results("agents")
    arms = {name: [run for run in agents["runs"] if run["skill"] == has] for name, has in (("without", 0), ("with", 1))}
    return {"agents": agents, "arms": arms, "mean_ratio": mean_ratio, "median_minutes": median_minutes}


def triton() -> Values:
    """Return the values of docs/triton.md, of whose figures those on a GPU may be missing."""
    names = ("triton-aot.h200", "triton-public.h200")
    report, public = (results(name) if (RESULTS / f"{name}.json").exists() else None for name in names)
    build = builder_rows(results("builder")["figures"]).get("triton")
    return {
        "report": report,
        "rows": [
            *(triton_results.rows(report) if report else []),
            *([build] if build else []),
            *(triton_results.public_rows(public) if public else []),
        ],
        "public": public,
        "head": triton_results.HEAD,
        "cells": list(triton_results.cells(report["operations"])) if report else [],
    }


def mean_ratio(runs: Sequence[Mapping[str, Any]], peer: str) -> float:
    """Return the geometric mean of a peer's time divided by the candidate's.

    As in `skills eval`, a candidate that is wrong or slower counts as 1, since the reference is used in its place.
    """
    return statistics.geometric_mean([max(1.0, run[peer] or 1.0) for run in runs])


def median_minutes(runs: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(run["minutes"] for run in runs)


PAGES: dict[str, Callable[[], Values]] = {
    "README.md": readme,
    "docs/compatibility.md": compatibility,
    "docs/figures.md": figures,
    "docs/kernels.md": kernels,
    "docs/models.md": models,
    "docs/skills.md": skills,
    "docs/triton.md": triton,
}

_templates = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.globals.update(table=table, targets=targets, spread=spread)
_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
SITE = "site"  # a block that only the site has; docs/pages.py adds it


@cache
def render(page: str) -> dict[str, str]:
    """Return each block of a page's template as Markdown."""
    text = _templates.get_template(f"{Path(page).name}.jinja").render(PAGES[page]())
    return {match[2]: match[3].strip() for match in _BLOCK.finditer(text)}


def filled(page: str, text: str) -> str:
    """Return the text of a page with its blocks of figures as the results have them.

    Raises:
        ValueError: If the page has not each block of its template once, or has another one.
    """
    blocks = render(page)
    present, expected = sorted(match[2] for match in _BLOCK.finditer(text)), sorted(blocks.keys() - {SITE})
    if present != expected:
        raise ValueError(f"{page} has the blocks of figures {present}, expected {expected}, each once")
    return _BLOCK.sub(lambda match: f"{match[1]}\n{blocks[match[2]]}\n\n{match[4]}", text)


def main() -> None:
    """Write the pages, or compare them."""
    differing = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        if (new := filled(page, text)) != text:
            differing.append(page)
            if "--check" not in sys.argv:
                (ROOT / page).write_text(new, encoding="utf-8")
    if "--check" in sys.argv and differing:
        raise SystemExit(f"{', '.join(differing)}: the figures differ from benchmarks/results; run benchmarks/pages.py")


if __name__ == "__main__":
    main()
