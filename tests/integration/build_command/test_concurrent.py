"""Builds that run at the same time, and files and readers that change during a build."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.integration.build_command.conftest import (
    BUILDER,
    Copy,
    NewCache,
    Start,
    assert_whole,
    compiling,
    environment,
    replace,
    wait_for,
    working_in,
)
from tests.support.places import CPU


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


def test_a_python_file_that_changes_during_the_build_is_an_error(
    slow_project: Path, new_cache: NewCache, start: Start
) -> None:
    """The name of a binary is a digest that includes the Python files, so they must not change during the build."""
    replace(slow_project / "scale" / "scale_cpu.cpp", "count(1000000000)", "count(100000)")
    cache = new_cache("cache")
    process = start(cache, slow_project, "--no-load")
    assert wait_for(compiling(cache), 30)
    python = slow_project / "torch-ext" / "stable_scale" / "__init__.py"
    python.write_text(python.read_text() + "# changed\n")
    stdout, _ = process.communicate()
    answer = json.loads(stdout)
    assert process.returncode == 5, answer
    assert answer["where"] == str(python)
    assert "changed while" in answer["message"]
    assert answer["hint"] == "run the build again"
    assert not (slow_project / "build").exists()


def test_a_closed_pipe_ends_the_build_without_a_traceback(slow_project: Path, new_cache: NewCache) -> None:
    """`kernel-builder build 2>&1 | head -1`: no traceback, no compilers left."""
    cache = new_cache("cache")
    source = slow_project / "scale" / "scale_cpu.cpp"
    replace(source, "count(1000000000)", "count(100000)")
    script = f"{shlex.quote(str(BUILDER))} build {shlex.quote(str(slow_project))} --variant {CPU}"
    script += " --no-load 2>&1 | head -1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment(cache), check=True)
    assert done.stdout == "1 variant, 1 binary\n"
    assert done.stderr == ""
    assert wait_for(lambda: working_in(cache) == {}, 10)
