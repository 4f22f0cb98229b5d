"""Running a graph: existing outputs are kept, and missing ones appear whole or not at all."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.progress import Silent, Unit
from kernel_builder.steps import ninja_run
from kernel_builder.steps.cache import binary_path, digest_path, object_path, write_log
from kernel_builder.steps.graph import CompileStep, Graph
from kernel_builder.steps.plan import plan
from kernel_builder.steps.step_scripts import stage_compile
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import StoreError
from tests.support.places import CPU

Copy = Callable[..., Path]
NewCache = Callable[[str], Path]


@pytest.fixture
def directory(copy_project: Copy) -> Path:
    return copy_project("stable-scale")


class RecordedProgress(Silent):
    """Records the steps that a build reports, and that it reported a message."""

    def __init__(self) -> None:
        self.details: list[str] = []
        self.messages: list[str] = []
        self.message = threading.Event()

    def advance(self, task: str, done: int, total: int, *, unit: Unit = "steps", detail: str = "") -> None:
        self.details.append(detail)

    def say(self, message: str) -> None:
        self.messages.append(message)
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


def test_other_work_begins_beside_the_last_compile_step(directory: Path, new_cache: NewCache) -> None:
    """It is for what is built: not before a step has succeeded, or after one has failed."""
    cache, calls = new_cache("cache"), list[int]()

    def idle() -> None:
        calls.append(len(list(cache.rglob("*.o"))))

    ninja_run.run(planned(directory), cache, jobs=2, idle=idle)
    assert calls and calls[0] in (1, 2)
    calls.clear()
    with (directory / "scale" / "scale_cpu.cpp").open("a") as source:
        source.write("#error\n")
    assert ninja_run.run(planned(directory), new_cache("other"), jobs=2, idle=idle).failures
    assert not calls


def test_damaged_outputs_are_built_again(directory: Path, new_cache: NewCache) -> None:
    graph, cache = planned(directory), new_cache("cache")
    (binary,) = graph.binaries
    assert ninja_run.run(graph, cache, jobs=2).steps == 3
    whole = binary_path(cache, binary).read_bytes()
    os.truncate(binary_path(cache, binary), 1000)
    os.truncate(object_path(cache, binary.objects[0]), 0)
    outcome = ninja_run.run(graph, cache, jobs=1)
    assert (outcome.compiles, outcome.steps) == (1, 2)
    assert binary_path(cache, binary).read_bytes() == whole
    # Directories and pipes in their places are replaced as well.
    for made, compiles in ((binary_path(cache, binary), 0), (object_path(cache, binary.objects[0]), 1)):
        for make in (os.mkdir, os.mkfifo):
            for path in (made, digest_path(made)):
                binary_path(cache, binary).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                make(path)
                assert ninja_run.run(graph, cache, jobs=1).compiles == compiles
                assert binary_path(cache, binary).read_bytes() == whole


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
    assert error.log is not None
    log = Path(error.log).read_text()
    assert error.command and error.command in log
    assert "torch_binding.cpp" in error.output and error.output in log
    source.write_text(right)
    assert ninja_run.run(planned(directory), cache, jobs=2).compiles == 1


def test_logs_of_failed_steps_do_not_pile_up(new_cache: NewCache) -> None:
    cache = new_cache("cache")
    for number in range(105):
        log = write_log(cache, f"{number:03}", "words")
        assert log is not None
        os.utime(log, (number, number))
    assert sorted(path.name for path in (cache / "logs").iterdir()) == [f"{n:03}.log" for n in range(5, 105)]


class Slow:
    """A step that reports its start, and ends on request."""

    def __init__(self, directory: Path) -> None:
        self.begun, self.go_on = directory / "begun", directory / "go-on"
        self.script = f": > {self.begun}; until [ -e {self.go_on} ]; do sleep 0.05; done"

    def wait(self) -> None:
        for _ in range(600):
            if self.begun.exists():
                return
            time.sleep(0.05)
        raise TimeoutError


def slowed(graph: Graph, source: str, slow: Slow, directory: Path) -> Graph:
    """Return a graph in which the compiler of one source waits before it starts."""
    compiler = directory / "slow-compiler"
    compiler.write_text(f'#!/bin/sh\n{slow.script}\nexec "$@"\n')
    compiler.chmod(0o755)

    def change(step: CompileStep) -> CompileStep:
        return replace(step, argv=(str(compiler), *step.argv)) if step.source.endswith(source) else step

    variants = [
        replace(variant, binary=replace(variant.binary, objects=tuple(map(change, variant.binary.objects))))
        if variant.binary
        else variant
        for variant in graph.variants
    ]
    return Graph(tuple(variants))


def test_a_build_does_not_wait_for_the_compilers_of_another(
    directory: Path, copy_project: Copy, new_cache: NewCache, tmp_path: Path
) -> None:
    """The second build begins and ends while the first is compiling. By order of events, not by time."""
    cache, slow, other = new_cache("cache"), Slow(tmp_path), copy_project("stable-scale", "other")
    (other / "scale" / "scale_cpu.cpp").open("a").write("// Other.\n")
    graph = slowed(planned(directory), "scale_cpu.cpp", slow, tmp_path)
    first: list[ninja_run.Outcome] = []
    thread = threading.Thread(target=lambda: first.append(ninja_run.run(graph, cache, jobs=2)))
    thread.start()
    slow.wait()
    assert ninja_run.run(planned(other), cache, jobs=2).compiles == 2
    assert not first
    slow.go_on.touch()
    thread.join()
    assert first[0].compiles == 2
    assert not (cache / "work").exists()


def test_a_step_that_another_build_runs_is_not_run_twice(
    directory: Path, copy_project: Copy, new_cache: NewCache, tmp_path: Path
) -> None:
    """The source that both projects have is compiled by the first build; the second compiles its binding meanwhile."""
    cache, slow, other = new_cache("cache"), Slow(tmp_path), copy_project("stable-scale", "other")
    (other / "torch-ext" / "torch_binding.cpp").open("a").write("// Other.\n")
    graph = slowed(planned(directory), "scale_cpu.cpp", slow, tmp_path)
    outcomes: dict[str, ninja_run.Outcome] = {}
    recorded = RecordedProgress()

    def build(name: str, graph: Graph) -> None:
        outcomes[name] = ninja_run.run(graph, cache, jobs=1, progress=recorded if name == "second" else None)

    first = threading.Thread(target=build, args=("first", graph))
    second = threading.Thread(target=build, args=("second", planned(other)))
    first.start()
    slow.wait()
    second.start()
    assert recorded.message.wait(30)  # it has nothing left to do but to wait
    assert any("torch_binding.cpp" in detail for detail in recorded.details)
    slow.go_on.touch()
    first.join()
    second.join()
    assert (outcomes["first"].compiles, outcomes["second"].compiles) == (2, 1)
    assert outcomes["first"].failures == outcomes["second"].failures == {}


def test_a_step_of_a_build_that_fails_is_tried_by_the_one_that_waits(
    directory: Path, new_cache: NewCache, tmp_path: Path
) -> None:
    cache, slow = new_cache("cache"), Slow(tmp_path)
    graph = slowed(planned(directory), "scale_cpu.cpp", slow, tmp_path)
    (tmp_path / "slow-compiler").write_text(f"#!/bin/sh\n{slow.script}\nexit 1\n")
    outcomes: list[ninja_run.Outcome] = []
    first = threading.Thread(target=lambda: outcomes.append(ninja_run.run(graph, cache, jobs=1)))
    first.start()
    slow.wait()
    recorded, second = RecordedProgress(), []
    waiting = threading.Thread(
        target=lambda: second.append(ninja_run.run(planned(directory), cache, jobs=1, progress=recorded))
    )
    waiting.start()
    assert recorded.message.wait(30)
    slow.go_on.touch()
    first.join()
    waiting.join()
    assert len(outcomes[0].failures) == 1
    assert second[0].failures == {}
    assert second[0].compiles >= 1


def test_a_compiler_that_was_killed_for_lack_of_memory_runs_again_alone(
    directory: Path, new_cache: NewCache, tmp_path: Path
) -> None:
    cache = new_cache("cache")
    graph = slowed(planned(directory), "scale_cpu.cpp", Slow(tmp_path), tmp_path)
    wrapper = tmp_path / "slow-compiler"
    words = "g++: fatal error: Killed signal terminated program cc1plus"
    once = f"if mkdir {tmp_path}/killed 2>/dev/null; then echo '{words}'; exit 1; fi"
    wrapper.write_text(f'#!/bin/sh\n{once}\nexec "$@"\n')
    recorded = RecordedProgress()
    outcome = ninja_run.run(graph, cache, jobs=2, progress=recorded)
    assert (outcome.failures, outcome.compiles) == ({}, 2)
    assert recorded.message.is_set()
    wrapper.write_text(f"#!/bin/sh\necho '{words}'\nexit 1\n")
    (error,) = ninja_run.run(graph, new_cache("other"), jobs=2).failures.values()
    assert words in error.message
    assert error.hint is not None and "memory" in error.hint


@pytest.mark.parametrize("name", ["my cache", "one,two", "it's", "$HOME", "a:b", "a;b", "a(b)", "a&b", "a*b"])
def test_paths_that_nvcc_would_split_are_refused(directory: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="white space, commas") as caught:
        ninja_run.run(planned(directory), tmp_path / name, jobs=1)
    assert caught.value.where == str(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_the_default_number_of_jobs_is_at_most_the_number_of_cores() -> None:
    assert 1 <= ninja_run.default_jobs() <= len(os.sched_getaffinity(0))


def test_a_compiler_that_outlives_its_build_does_not_reach_the_cache(directory: Path, new_cache: NewCache) -> None:
    graph, cache = planned(directory), new_cache("cache")
    step = graph.compiles[1]
    output = object_path(cache, step)
    work = cache / "work" / "0"  # of a killed build: its lock is free
    stage_compile(step, work / step.key, output)
    script = work / step.key / "run.sh"
    *before, store, done = script.read_text().replace("exec >> log", "exec 3>&1 >> log").splitlines()
    script.write_text("\n".join([*before, "echo >&3; read line", store, done]))
    process = subprocess.Popen(
        ["sh", f"{step.key}/run.sh"],
        cwd=work,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"  # its object is whole, and not in the cache yet
    assert not output.exists()
    assert ninja_run.run(graph, cache, jobs=2).compiles == 2
    made = output.stat()
    (work / step.key / "inside").mkdir(parents=True)
    (work / step.key / "inside" / "out.o").write_text("half of another build's object")
    process.communicate("\n")
    assert process.returncode == 1
    assert output.stat() == made
    assert sorted(path.name for path in cache.iterdir()) == ["binaries", "locks", "objects", "toolchains", "work"]
