"""Running a graph: what is there is not made again, and what is missing is made whole or not at all."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.build import ninja_run
from kernel_builder.build.plan import Graph, plan
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.errors import BuildError, StoreError
from kernel_builder.toolchain import Toolchains
from tests.conftest import CPU

Copy = Callable[..., Path]
NewCache = Callable[[str], Path]


@pytest.fixture
def directory(copy_project: Copy) -> Path:
    return copy_project("stable-scale")


def planned(directory: Path) -> Graph:
    return plan([(read_project(directory), [Variant.parse(CPU)])], Toolchains())


def test_only_what_is_missing_is_made(directory: Path, new_cache: NewCache) -> None:
    graph, cache = planned(directory), new_cache("cache")
    (binary,) = graph.binaries
    titles: list[str] = []

    def run() -> tuple[int, int]:
        titles.clear()
        outcome = ninja_run.run(graph, cache, jobs=1, progress=lambda done, total, title: titles.append(title))
        assert not (cache / "work").exists()
        return outcome.compiles, outcome.steps

    assert run() == (2, 3)
    assert titles[-1] == "link stable-scale cpu"
    assert run() == (0, 0)
    whole = ninja_run.binary_path(cache, binary).read_bytes()
    ninja_run.binary_path(cache, binary).unlink()
    assert run() == (0, 1)
    ninja_run.binary_path(cache, binary).unlink()
    ninja_run.object_path(cache, binary.objects[1]).unlink()
    assert run() == (1, 2)
    assert ninja_run.binary_path(cache, binary).read_bytes() == whole


def test_files_that_changed_since_the_plan_are_refused(directory: Path, new_cache: NewCache) -> None:
    """Otherwise an object would be kept under the name of another source."""
    graph, cache = planned(directory), new_cache("cache")
    source = directory / "scale" / "scale_cpu.cpp"
    source.write_text(source.read_text() + "\n")
    with pytest.raises(BuildError, match="changed while it was being built") as caught:
        ninja_run.run(graph, cache, jobs=1)
    assert caught.value.where == str(source)
    source.unlink()
    with pytest.raises(BuildError, match="changed while it was being built"):
        ninja_run.run(graph, cache, jobs=1)
    assert not list(cache.glob("objects/*/*"))


def test_a_failed_step_keeps_the_results_of_others(directory: Path, new_cache: NewCache) -> None:
    source = directory / "scale" / "scale_cpu.cpp"
    right = source.read_text()
    source.write_text(right.replace("in[i]", "[i]"))
    cache = new_cache("cache")
    with pytest.raises(BuildError):
        ninja_run.run(planned(directory), cache, jobs=2)
    source.write_text(right)
    assert ninja_run.run(planned(directory), cache, jobs=2).compiles == 1


def test_one_build_at_a_time_uses_a_cache(directory: Path, new_cache: NewCache) -> None:
    graph, cache = planned(directory), new_cache("cache")
    waiting, done = threading.Event(), threading.Event()

    def build() -> None:
        ninja_run.run(graph, cache, jobs=1, waiting=waiting.set)
        done.set()

    thread = threading.Thread(target=build)
    with (cache / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread.start()
        assert waiting.wait(10)
        assert not done.wait(0.2)
        assert not (cache / "work").exists()
    assert done.wait(60)
    thread.join()


@pytest.mark.parametrize("name", ["my cache", "one,two", "it's", "$HOME", "a:b"])
def test_paths_that_compilers_take_apart_are_refused(directory: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="white space, quotes, commas") as caught:
        ninja_run.run(planned(directory), tmp_path / name, jobs=1)
    assert caught.value.where == str(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_jobs_are_at_most_the_processors() -> None:
    assert 1 <= ninja_run.default_jobs() <= len(os.sched_getaffinity(0))
