"""Measures every figure of docs/figures.md with the commands that a user types.

    .venv/bin/python benchmarks/builder.py --json benchmarks/results/builder.json --markdown docs/figures.md

Builds use copies of the projects and caches of their own, which share only the user's downloaded toolchains. CPU time
includes child processes; on a busy machine it is more reliable than wall time.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from builder_figures import FIGURES
from builder_runs import Workspace
from figures import FiguresPage, machine, measure, options, write_page
from torch_extension_build import CUDA

from kernel_builder.backends.cuda import releases as cuda_releases
from kernel_builder.backends.cuda import toolkits
from kernel_builder.toolchain import Toolchains

QUICK = ("further-torch", "nothing-changed", "one-source", "warm-cache", "load-time")


def describe_machine(on: Mapping[str, Any]) -> str:
    """Describe the machine of a report in one line."""
    return (
        f"{on['cpu']}, {on['cores']} cores, {on['system']}, g++ {on['g++']}, nvcc {', '.join(on['nvcc'].values())}, "
        f"Python {on['python']}, Torch {on['torch']}, kernels {on['kernels']}."
    )


PAGE = FiguresPage(
    title="Figures of the builder",
    command=".venv/bin/python benchmarks/builder.py --json benchmarks/results/builder.json --markdown docs/figures.md",
    figures=FIGURES,
    describe_machine=lambda on: f"{describe_machine(on)} CPU time includes child processes.",
    introduction=(
        "## Commands",
        "`rmsnorm` is a copy of kernels/rmsnorm; the directory before it tells copies apart. Each build starts with an "
        "empty cache, except where the figure says otherwise.",
    ),
)


def builder_machine() -> dict[str, Any]:
    """Return the machine, with the compilers that builds on it use."""
    toolchains = Toolchains()
    return {
        **machine("torch", "kernels", "ninja"),
        "g++": toolchains.host().version,
        "nvcc": {str(cuda): toolkits.toolkit(toolchains, cuda).version for cuda in cuda_releases() if cuda >= CUDA},
    }


@click.command()
@click.option("--quick", is_flag=True, help="Only the figures that need no second cold build of rmsnorm.")
@options(list(FIGURES))
def main(only: tuple[str, ...], quick: bool, json_file: Path | None, markdown: Path | None, page_only: bool) -> None:
    """Measure the builder, in about ten minutes on two cores."""
    if page_only:
        write_page(PAGE, json_file, markdown)
        return
    with tempfile.TemporaryDirectory(prefix="kernel-builder-figures-") as directory:
        workspace = Workspace(Path(directory).resolve())
        status = measure(
            PAGE,
            only or (QUICK if quick else tuple(FIGURES)),
            lambda name: FIGURES[name].measure(workspace),
            builder_machine(),
            json_file=json_file,
            markdown=markdown,
        )
    sys.exit(status)


if __name__ == "__main__":
    main()
