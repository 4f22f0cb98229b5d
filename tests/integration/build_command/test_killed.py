"""Builds that are killed or stopped leave nothing that disturbs a later build."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.build_command.conftest import (
    Copy,
    NewCache,
    Run,
    Start,
    assert_whole,
    compiling,
    untouched,
    wait_for,
    working_in,
)
from tests.support.places import CPU


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "group"),
    [("[1/3]", True), ("] checking", False)],
)
def test_a_build_after_a_killed_one_gives_the_same_packages(
    copy_project: Copy,
    new_cache: NewCache,
    kernel_builder: Run,
    start: Start,
    undisturbed: dict[str, bytes | str],
    line: str,
    group: bool,
) -> None:
    """The first build, or its whole group, gets SIGKILL while it compiles, links or packages."""
    project, cache = copy_project("stable-scale"), new_cache("cache")
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
    again = kernel_builder(cache, "build", project, "--variant", CPU, "--no-load")
    assert again.code == 0, again
    assert_whole(project, cache, undisturbed)
    assert working_in(cache) == {}


@pytest.mark.parametrize(
    ("how", "group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False)],
)
def test_a_signal_stops_the_build_and_its_compilers(
    slow_project: Path, new_cache: NewCache, start: Start, how: signal.Signals, group: bool
) -> None:
    """On Ctrl-C or SIGTERM the builder and its compilers end before the compile does, without a traceback."""
    cache = new_cache("cache")
    with untouched(slow_project):
        process = start(cache, slow_project)
        assert wait_for(compiling(cache), 30)
        (os.killpg if group else os.kill)(process.pid, how)
        stdout, stderr = process.communicate(timeout=20)
    assert process.returncode in {1, 128 + how}, (process.returncode, stderr)
    assert stdout == ""
    assert "Traceback" not in stderr
    assert working_in(cache) == {}
    assert not list(cache.glob("binaries/*/*")), "the compile, which takes a minute, was stopped"


def test_compilers_of_a_killed_build_end_with_it(slow_project: Path, new_cache: NewCache, start: Start) -> None:
    cache = new_cache("cache")
    process = start(cache, slow_project)
    assert wait_for(compiling(cache), 30)
    process.kill()
    process.wait()
    assert wait_for(lambda: working_in(cache) == {}, 5)
