"""Running a graph: existing outputs are kept, and missing ones appear whole or not at all."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.build import ninja_run
from kernel_builder.build.cache import binary_path, object_path, work_directory
from kernel_builder.build.graph import Graph
from kernel_builder.build.plan import plan
from kernel_builder.build.step_scripts import stage_compile
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.errors import BuildError, StoreError
from kernel_builder.files import locked
from kernel_builder.progress import Silent, Unit
from kernel_builder.toolchain import Toolchains
from tests.conftest import CPU

Copy = Callable[..., Path]
NewCache = Callable[[str], Path]


@pytest.fixture
def directory(copy_project: Copy) -> Path:
    return copy_project("stable-scale")


class RecordedProgress(Silent):
    """Records the steps that a build reports, and that it reported a message."""

    def __init__(self) -> None:
        self.details: list[str] = []
        self.message = threading.Event()

    def advance(self, task: str, done: int, total: int, *, unit: Unit = "steps", detail: str = "") -> None:
        self.details.append(detail)

    def say(self, message: str) -> None:
        self.message.set()


def planned(directory: Path) -> Graph:
    return plan([(read_project(directory), [Variant.parse(CPU)])], Toolchains())


def test_only_missing_outputs_are_built(directory: Path, new_cache: NewCache) -> None:
    graph, cache = planned(directory), new_cache("cache")
    (binary,) = graph.binaries
    recorded = RecordedProgress()

    def run() -> tuple[int, int]:
        recorded.details.clear()
        outcome = ninja_run.run(graph, cache, jobs=1, progress=recorded)
        assert not (cache / "work").exists()
        return outcome.compiles, outcome.steps

    assert run() == (2, 3)
    assert recorded.details[-1] == "link stable-scale cpu"
    assert run() == (0, 0)
    whole = binary_path(cache, binary).read_bytes()
    binary_path(cache, binary).unlink()
    assert run() == (0, 1)
    binary_path(cache, binary).unlink()
    object_path(cache, binary.objects[1]).unlink()
    assert run() == (1, 2)
    assert binary_path(cache, binary).read_bytes() == whole


def test_files_that_changed_since_the_plan_are_refused(directory: Path, new_cache: NewCache) -> None:
    """Without this error, the cache would hold an object of the changed source under the key of the old one."""
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
    source = directory / "torch-ext" / "torch_binding.cpp"
    right = source.read_text()
    source.write_text(right + "int broken(")
    cache = new_cache("cache")
    with pytest.raises(BuildError):
        ninja_run.run(planned(directory), cache, jobs=2)
    source.write_text(right)
    assert ninja_run.run(planned(directory), cache, jobs=2).compiles == 1


def test_one_build_at_a_time_uses_a_cache(directory: Path, new_cache: NewCache) -> None:
    graph, cache = planned(directory), new_cache("cache")
    recorded, done = RecordedProgress(), threading.Event()

    def build() -> None:
        ninja_run.run(graph, cache, jobs=1, progress=recorded)
        done.set()

    thread = threading.Thread(target=build)
    with locked(cache / "build.lock"):
        thread.start()
        assert recorded.message.wait(10)
        assert not done.wait(0.2)
        assert not (cache / "work").exists()
    assert done.wait(60)
    thread.join()


@pytest.mark.parametrize("name", ["my cache", "one,two", "it's", "$HOME", "a:b"])
def test_paths_that_nvcc_would_split_are_refused(directory: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="white space, quotes, commas") as caught:
        ninja_run.run(planned(directory), tmp_path / name, jobs=1)
    assert caught.value.where == str(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_the_default_number_of_jobs_is_at_most_the_number_of_cores() -> None:
    assert 1 <= ninja_run.default_jobs() <= len(os.sched_getaffinity(0))


def test_a_compiler_that_outlives_its_build_does_not_reach_the_cache(directory: Path, new_cache: NewCache) -> None:
    graph, cache = planned(directory), new_cache("cache")
    step = graph.compiles[1]
    output = object_path(cache, step)
    with work_directory(cache) as work:
        stage_compile(step, work / step.key, output)
        script = work / step.key / "run.sh"
        text = (
            script.read_text()
            .replace("exec >> log", "exec 3>&1 >> log")
            .replace("[ . -ef", "echo >&3; read line\n[ . -ef")
        )
        script.write_text(text)
        process = subprocess.Popen(
            ["sh", f"{step.key}/run.sh"], cwd=work, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"  # its object is whole, and not in the cache yet
        assert not output.exists()
        assert ninja_run.run(graph, cache, jobs=2).compiles == 2
        made = output.stat()
        (work / step.key).mkdir(parents=True)
        (work / step.key / "out.o").write_text("half of another build's object")
        process.communicate("\n")
    assert process.returncode == 1
    assert output.stat() == made
    assert sorted(path.name for path in cache.iterdir()) == ["binaries", "build.lock", "objects", "toolchains"]
