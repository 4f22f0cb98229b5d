"""Each kernel's use of the GPU. The sources are compiled once more, for the compiler's report."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernel_builder.backends.cuda import ptxas_report
from kernel_builder.backends.cuda.ptxas_report import KernelResources
from kernel_builder.demangle import demangle
from kernel_builder.progress import Progress
from kernel_builder.steps import ninja_run
from kernel_builder.steps.cache import work_directory
from kernel_builder.steps.confinement import Confinement
from kernel_builder.steps.graph import CompileStep, Graph
from kernel_format.files import remove_tree


@dataclass(frozen=True)
class SourceResources:
    """The kernels of one source, for all capabilities of the variants that it is compiled for.

    Attributes:
        title: The title of the compile step.
        variants: Their names.
        kernels: In the compiler's order, with their C++ declarations as names.
    """

    title: str
    variants: tuple[str, ...]
    kernels: tuple[KernelResources, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the kernels as `--json` prints them."""
        kernels = [kernel.as_dict() for kernel in self.kernels]
        return {"source": self.title, "variants": list(self.variants), "kernels": kernels}


def report(
    graph: Graph, cache: Path, *, jobs: int, confinement: Confinement, progress: Progress
) -> tuple[SourceResources, ...]:
    """Compile the device code of a graph, and return the compilers' reports of its kernels.

    The objects are not cached, since the options for a report would be part of their keys.

    Raises:
        BuildError: If a compiler fails.
        StoreError: If the cache cannot be written.
    """
    steps = [step for step in graph.compiles if step.compiler.report]
    with work_directory(cache) as work, ThreadPoolExecutor(jobs) as pool:
        read = pool.map(lambda step: _kernels(step, work, confinement), steps)
        return tuple(_reported(graph, steps, read, progress))


def _reported(
    graph: Graph, steps: list[CompileStep], read: Iterator[tuple[KernelResources, ...]], progress: Progress
) -> Iterator[SourceResources]:
    for number, step in enumerate(steps, 1):
        kernels = next(read)
        progress.advance("reading resources", number, len(steps), detail=step.title)
        yield SourceResources(step.title, graph.variants_of(step), kernels)


def _kernels(step: CompileStep, work: Path, confinement: Confinement) -> tuple[KernelResources, ...]:
    verbose = replace(step, argv=(*step.argv, *step.compiler.report))
    # One thread: the reports of several would be mixed.
    printed = ninja_run.compile_alone(verbose, work, work / f"{step.key}.o", 1, confinement)
    remove_tree(work / step.key)
    kernels = tuple(ptxas_report.read(printed))
    names = demangle(kernel.kernel for kernel in kernels)
    return tuple(replace(kernel, kernel=names[kernel.kernel]) for kernel in kernels)
