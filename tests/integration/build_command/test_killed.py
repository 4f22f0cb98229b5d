"""Builds that are killed or stopped leave nothing that disturbs a later build."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.integration.build_command.conftest import (
    Copy,
    NewCache,
    Run,
    Start,
    assert_whole,
    compiling,
    replace,
    snapshot,
    untouched,
    wait_for,
    working_in,
)
from tests.support.places import CPU


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "group"),
    [*((line, False) for line in ("1 variant, ", "[1/3]", "[2/3]", "[3/3]", "] checking")), ("[1/3]", True)],
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
    """The first build gets SIGKILL while it plans, compiles, links or packages.

    Its whole group gets it once, while it compiles: what is left of one that dies at once is less.
    """
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


@pytest.mark.slow
def test_a_killed_build_leaves_the_old_or_the_new_packages(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, start: Start, undisturbed: dict[str, bytes | str]
) -> None:
    """After a SIGKILL at any moment, `build` has the complete old packages or the complete new ones."""
    project, cache = copy_project("stable-scale"), new_cache("cache")
    source = project / "scale" / "scale_cpu.cpp"
    changed = source.read_text()
    replace(source, "factor * in[i]", "factor * in[i] + 1")
    arguments = ("build", project, "--variant", CPU, "--no-load")
    assert kernel_builder(cache, *arguments).code == 0
    old = snapshot(project / "build")
    source.write_text(changed)
    warm = new_cache("warm")
    assert kernel_builder(warm, *arguments, "--out", project.parent / "out").code == 0
    shutil.rmtree(warm / "packages")
    for moment in range(6):
        process = start(warm, project, "--no-load")
        assert process.stderr is not None
        assert any("] checking" in words for words in process.stderr)
        time.sleep(moment * 0.008)
        process.kill()
        process.wait()
        now = {name: text for name, text in snapshot(project / "build").items() if not name.startswith(".")}
        assert now == old if moment == 0 else now in (old, undisturbed)
    assert kernel_builder(warm, *arguments).code == 0
    assert_whole(project, warm, undisturbed)


@pytest.mark.parametrize(
    ("how", "group"),
    [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, True)],
)
def test_a_signal_stops_the_build_and_its_compilers(
    slow_project: Path, new_cache: NewCache, start: Start, how: signal.Signals, group: bool
) -> None:
    """On Ctrl-C, SIGTERM or SIGHUP the builder and its compilers end before the compile does, without a traceback."""
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


def test_compilers_that_outlive_a_killed_build_do_no_harm(
    slow_project: Path, new_cache: NewCache, kernel_builder: Run, start: Start
) -> None:
    """The next build does not wait for these compilers. They write neither to its directory nor to the cache."""
    replace(slow_project / "scale" / "scale_cpu.cpp", "count(1000000000)", "count(100000)")
    cache = new_cache("cache")
    # In the session of this test: in a session of its own, the kernel would continue a stopped process
    # when its parent dies.
    first = start(cache, slow_project, own_session=False)
    assert wait_for(compiling(cache), 30)
    running = working_in(cache)
    ninja = next(number for number, command in running.items() if "/ninja -C" in command)
    compiler = next(number for number, command in running.items() if "cc1plus" in command and "scale_cpu" in command)
    for process in (ninja, compiler):
        os.kill(process, signal.SIGSTOP)
    first.kill()
    first.wait()
    assert compiling(cache)()
    arguments = ("build", slow_project, "--variant", CPU, "--no-load")
    second = kernel_builder(cache, *arguments)
    assert second.code == 0 and second.answer["steps"] >= 2, second  # the binding may have been compiled before
    outputs = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.suffix in (".o", ".so")}
    assert len(outputs) == 3
    os.kill(compiler, signal.SIGCONT)
    assert wait_for(lambda: working_in(cache).keys() <= {ninja}, 60)
    os.kill(ninja, signal.SIGCONT)
    assert wait_for(lambda: working_in(cache) == {}, 10)
    assert {path: path.stat().st_mtime_ns for path in outputs} == outputs
    assert not (cache / "work").exists()
    assert kernel_builder(cache, *arguments).answer["steps"] == 0


def test_a_build_stopped_while_checking_leaves_nothing_behind(
    copy_project: Copy, new_cache: NewCache, start: Start
) -> None:
    """The build removes its staging directory and ends the process that loads the package."""
    project, cache = copy_project("stable-scale"), new_cache("cache")
    package = next(project.glob("torch-ext/*/__init__.py"))
    package.write_text(f"import time\n\ntime.sleep(60)\n{package.read_text()}")
    with untouched(project):
        process = start(cache, project)
        assert process.stderr is not None
        assert any("] checking" in words for words in process.stderr)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in stderr
    assert working_in(project) == {}
