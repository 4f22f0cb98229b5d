"""Running a graph: existing outputs are kept, and missing ones appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.progress import Progress, Unit
from kernel_builder.steps import ninja_run
from kernel_builder.steps.cache import output_path
from kernel_builder.steps.graph import Graph
from kernel_builder.steps.plan import plan
from kernel_builder.toolchain import Toolchains
from tests.support.places import CPU

Copy = Callable[..., Path]
NewCache = Callable[[str], Path]


@pytest.fixture
def directory(copy_project: Copy) -> Path:
    return copy_project("stable-scale")


class RecordedProgress(Progress):
    """Records the steps that a build reports."""

    def __init__(self) -> None:
        self.details: list[str] = []

    def advance(self, task: str, done: int, total: int, *, unit: Unit = "steps", detail: str = "") -> None:
        self.details.append(detail)


def planned(directory: Path) -> Graph:
    return plan([(read_project(directory), [Variant.parse(CPU)])], Toolchains())


def test_only_missing_and_damaged_outputs_are_built(directory: Path, new_cache: NewCache) -> None:
    graph, cache = planned(directory), new_cache("cache")
    (binary,) = graph.binaries
    recorded = RecordedProgress()

    def run() -> tuple[int, int]:
        recorded.details.clear()
        outcome = ninja_run.run(graph, cache, jobs=1, progress=recorded)
        assert not list((cache / "work").glob("*"))
        return outcome.compiles, outcome.steps

    assert run() == (2, 3)
    assert recorded.details[-1] == "link stable-scale cpu"
    assert run() == (0, 0)
    whole = output_path(cache, binary).read_bytes()
    output_path(cache, binary).unlink()
    assert run() == (0, 1)
    output_path(cache, binary).unlink()
    output_path(cache, binary.objects[1]).unlink()
    assert run() == (1, 2)
    assert output_path(cache, binary).read_bytes() == whole
    os.truncate(output_path(cache, binary), 1000)
    output_path(cache, binary.objects[0]).unlink()
    os.mkfifo(output_path(cache, binary.objects[0]))  # by another user of a shared cache
    assert run() == (1, 2)
    assert output_path(cache, binary).read_bytes() == whole


def test_files_that_changed_since_the_plan_are_refused(directory: Path, new_cache: NewCache) -> None:
    """Without this error, the cache would hold an object of the changed source under the key of the old one."""
    graph, cache = planned(directory), new_cache("cache")
    source = directory / "scale" / "scale_cpu.cpp"
    source.write_text(source.read_text() + "\n")
    (error,) = ninja_run.run(graph, cache, jobs=1).failures.values()
    assert "changed while it was being built" in error.message
    assert error.where == str(source)
    source.unlink()
    (error,) = ninja_run.run(graph, cache, jobs=1).failures.values()
    assert "changed while it was being built" in error.message
    assert len(list(cache.glob("objects/*/*.o"))) == 1  # that of the other source
    assert not list(cache.glob("binaries/*/*"))


def test_a_failed_step_keeps_the_results_of_others(directory: Path, new_cache: NewCache) -> None:
    source = directory / "torch-ext" / "torch_binding.cpp"
    right = source.read_text()
    source.write_text(right + "int broken(")
    graph, cache = planned(directory), new_cache("cache")
    outcome = ninja_run.run(graph, cache, jobs=1)
    assert outcome.compiles == 1
    (binary,) = graph.binaries
    (error,) = outcome.errors_of(binary)
    assert error.where == str(source)
    source.write_text(right)
    assert ninja_run.run(planned(directory), cache, jobs=2).compiles == 1
