"""Builds that are killed or stopped, that run at the same time, and whose files and readers change meanwhile."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.build_command.conftest import (
    BUILDER,
    FOR_CPU,
    Copy,
    NewCache,
    Run,
    Start,
    assert_whole,
    compiling,
    environment,
    untouched,
    working_in,
)
from tests.support.files import replace
from tests.support.places import CPU
from tests.support.programs import wait_for

pytestmark = pytest.mark.attack


@pytest.mark.slow
@pytest.mark.parametrize(("line", "group"), [("[1/3]", True), ("] checking", False)])
def test_a_build_after_a_killed_one_gives_the_same_packages(
    copy_project: Copy, kernel_builder: Run, start: Start, undisturbed: dict[str, bytes | str], line: str, group: bool
) -> None:
    """The first build, or its whole group, gets SIGKILL while it compiles, links or packages."""
    project, cache = copy_project("stable-scale"), kernel_builder.cache
    loads = () if "checking" in line else ("--no-load",)
    process = start(cache, project, *loads)
    assert process.stderr is not None
    assert any(line in words for words in process.stderr)
    if group:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    assert not list((project / "build").glob("torch*"))
    kernel_builder.build(project, *FOR_CPU)
    assert_whole(project, cache, undisturbed)
    assert working_in(cache) == {}


@pytest.mark.parametrize(("how", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_stops_the_build_and_its_compilers(
    slow_project: Path, cache: Path, start: Start, how: signal.Signals, group: bool
) -> None:
    """On Ctrl-C or SIGTERM the builder and its compilers end before the compile does, without a traceback."""
    with untouched(slow_project):
        process = start(cache, slow_project)
        assert wait_for(compiling(cache))
        (os.killpg if group else os.kill)(process.pid, how)
        stdout, stderr = process.communicate()
    assert process.returncode in {1, 128 + how}, (process.returncode, stderr)
    assert stdout == ""
    assert "Traceback" not in stderr
    assert working_in(cache) == {}
    assert not list(cache.glob("binaries/*/*")), "the compile, which takes a minute, was stopped"


def test_compilers_of_a_killed_build_end_with_it(slow_project: Path, cache: Path, start: Start) -> None:
    process = start(cache, slow_project)
    assert wait_for(compiling(cache))
    process.kill()
    process.wait()
    assert wait_for(lambda: working_in(cache) == {}, 30), "the compile would take a minute"


@pytest.mark.slow
@pytest.mark.parametrize("caches", [1, 2])
def test_two_builds_of_one_project_at_once(
    copy_project: Copy, new_cache: NewCache, start: Start, undisturbed: dict[str, bytes | str], caches: int
) -> None:
    project = copy_project("stable-scale")
    used = [new_cache(f"cache{number}") for number in range(caches)]
    both = [start(used[number % caches], project, "--no-load") for number in range(2)]
    answers = [json.loads(process.communicate()[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    for cache in used:
        assert_whole(project, cache, undisturbed)
    if caches == 1:
        assert sorted(answer["compiles"] for answer in answers) == [0, 2]


def test_a_python_file_that_changes_during_the_build_is_an_error(slow_project: Path, cache: Path, start: Start) -> None:
    """The name of a binary is a digest that includes the Python files, so they must not change during the build."""
    replace(slow_project / "scale" / "scale_cpu.cpp", "count(1000000000)", "count(100000)")
    process = start(cache, slow_project, "--no-load")
    assert wait_for(compiling(cache, signal.SIGSTOP))
    python = slow_project / "torch-ext" / "stable_scale" / "__init__.py"
    python.write_text(python.read_text() + "# changed\n")
    assert compiling(cache, signal.SIGCONT)()
    stdout, _ = process.communicate()
    answer = json.loads(stdout)
    assert process.returncode == 5, answer
    assert answer["where"] == str(python)
    assert "changed while" in answer["message"]
    assert answer["hint"] == "run the build again"
    assert not (slow_project / "build").exists()


def test_a_closed_pipe_ends_the_build_without_a_traceback(slow_project: Path, cache: Path) -> None:
    """`kernel-builder build 2>&1 | head -1`: no traceback, no compilers left."""
    replace(slow_project / "scale" / "scale_cpu.cpp", "count(1000000000)", "count(100000)")
    script = f"{shlex.quote(str(BUILDER))} build {shlex.quote(str(slow_project))} --variant {CPU}"
    script += " --no-load 2>&1 | head -1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment(cache), check=True)
    assert done.stdout == "1 variant, 1 binary\n"
    assert done.stderr == ""
    assert wait_for(lambda: working_in(cache) == {})
