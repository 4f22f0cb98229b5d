"""Fixtures and assertions of the end-to-end tests: processes run the command line, with the real compilers."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from kernel_format.cache_directory import default_cache
from kernel_format.errors import KernelBuilderError
from kernel_format.files import debugging
from tests.support.cli import invoke
from tests.support.files import append, replace, write_files
from tests.support.fork_server import ForkServer
from tests.support.places import CPU, PROJECTS, ROOT, SOURCES
from tests.support.torch_process import output_with_torch

BUILDER = Path(sys.executable).with_name("kernel-builder")
# The imports of a build; the client reads whether it is offline when it is imported.
COMMANDS = ForkServer(
    "kernel_builder.cli.build_command",
    "kernel_builder.pipeline",
    "kernels",
    "vermin",
    "elftools.elf.elffile",
    "auditwheel.policy",
    HF_HUB_OFFLINE="1",
)
RIGHT = "out[i] = factor * in[i]"
MEASURED = ("--dtype", "float32", "--rounds", "3")

# The package of the CPU variant, which is not loaded.
FOR_CPU = ("--variant", CPU, "--no-load")

# An error, and texts in its place, message and hint; None if it has no hint.
Refusal = tuple[type[KernelBuilderError], str | Path, str, str | None]


@dataclass(frozen=True)
class Done:
    """The result of a command; `answer` is the JSON that it printed."""

    code: int
    answer: Any
    stderr: str


@dataclass(frozen=True)
class Run:
    """Runs the command line with `--json`. `cache` is that of the test's builds, unless they name another one."""

    cache: Path

    def __call__(self, cache: Path, *arguments: str | Path, **more: str) -> Done:
        """Run a command with a cache, and with more variables of the environment."""
        done = command(cache, *arguments, "--json", **more)
        assert "Traceback" not in done.stderr, done.stderr
        return Done(done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr)

    def build(self, *arguments: str | Path, cache: Path | None = None, **more: str) -> Any:
        """Run a build that succeeds, and return its answer."""
        done = self(cache or self.cache, "build", *arguments, **more)
        assert done.code == 0, done
        return done.answer

    def refuse(
        self, project: Path, *options: str | Path, expected: Refusal, cache: Path | None = None, **more: str
    ) -> Done:
        """Run a build of a project that fails as expected, and changes nothing in the project."""
        with untouched(project):
            done = self(cache or self.cache, "build", project, *options, **more)
        assert_refused(done, expected)
        return done


Copy = Callable[..., Path]
NewCache = Callable[[str], Path]
Start = Callable[..., "subprocess.Popen[str]"]

# Loads the CPU package of a scale project with the client, calls it, and compiles it with torch.compile.
LOAD = SOURCES["load_by_client"]
run_python = partial(output_with_torch, HF_HUB_OFFLINE="1")


def environment(cache: Path, **more: str) -> dict[str, str]:
    """Return the environment of a build with this cache and without the network."""
    return {**os.environ, "KERNEL_BUILDER_CACHE": str(cache), "HF_HUB_OFFLINE": "1", **more}


def snapshot(directory: Path) -> dict[str, bytes | str]:
    """Return everything below a directory, hidden entries too: content of files, targets of links, directories."""
    contents: dict[str, bytes | str] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            contents[name] = f"-> {path.readlink()}"
        else:
            contents[name] = path.read_bytes() if path.is_file() else "directory"
    return contents


@contextmanager
def untouched(*directories: Path) -> Iterator[None]:
    """Assert that the block changes nothing below the directories, to the byte."""
    before = [snapshot(directory) for directory in directories]
    yield
    assert [snapshot(directory) for directory in directories] == before


def assert_refused(done: Done, expected: Refusal) -> None:
    """Assert that a command failed with this error, and that its fields contain the texts."""
    (error, where, message, hint), got = expected, done.answer
    assert (done.code, got["error"]) == (error.exit_code, error.__name__), done
    assert str(where) in got["where"] and message in got["message"], done
    assert got["hint"] is None if hint is None else hint in got["hint"], done


def working_in(directory: Path) -> dict[int, str]:
    """Return the processes that work in a directory or name it, with their commands."""
    commands = {}
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        command = " ".join(process.info["cmdline"] or ())  # empty for a zombie
        if command and (str(directory) in command or Path(process.info["cwd"] or "/").is_relative_to(directory)):
            commands[process.info["pid"]] = command
    return commands


def compiling(cache: Path, *signals: signal.Signals) -> Callable[[], bool]:
    """Return a condition: a compiler that works in this cache compiles scale_cpu.cpp. It gets the signals."""
    name = re.compile("cc1plus.*scale_cpu.cpp")

    def is_compiling() -> bool:
        found = [number for number, command in working_in(cache).items() if name.search(command)]
        for number, sent in itertools.product(found, signals):
            os.kill(number, sent)
        return bool(found)

    return is_compiling


def assert_whole(project: Path, cache: Path, undisturbed: dict[str, bytes | str]) -> None:
    """Assert that the packages equal those of an undisturbed build, and that project and cache hold nothing else."""
    assert snapshot(project / "build") == undisturbed
    assert sorted(path.name for path in project.iterdir()) == ["build", "build.toml", "scale", "torch-ext"]
    assert not list((cache / "work").glob("*"))
    left = [str(path) for path in cache.rglob("*") if path.is_file() and "toolchains" not in path.parts]
    assert [name for name in left if not name.endswith((".o", ".so", ".sha256", ".json", ".lock"))] == []


def command(cache: Path, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, with more variables of the environment."""
    given, variables = [*map(str, arguments)], environment(cache, **more)
    if debugging():  # in this process, which a debugger controls
        done = invoke(*given, env=variables, catch_exceptions=False)
        return subprocess.CompletedProcess(given, done.exit_code, done.stdout, done.stderr)
    if any(name.startswith(("PYTHON", "HF_", "LOCAL_")) for name in more):  # read when modules are imported
        return subprocess.run([BUILDER, *given], capture_output=True, text=True, check=False, env=variables)
    return COMMANDS.run("from kernel_builder.cli import main; main()", given, variables)


@pytest.fixture
def kernel_builder(cache: Path) -> Run:
    return Run(cache)


@pytest.fixture
def project(copy_project: Copy) -> Path:
    """Return a project with an earlier package in its `build`."""
    return write_files(copy_project("stable-scale"), {f"build/{CPU}/metadata.json": "{}"})


@pytest.fixture
def cache(new_cache: NewCache) -> Path:
    return new_cache("default-cache")


@pytest.fixture(scope="session")
def shared_cache() -> Path:
    """Return the user's cache, for tests that only need a built package: they share its objects, also between runs."""
    return default_cache()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> dict[str, bytes | str]:
    """Return the packages of an undisturbed build of the CPU variant of stable-scale."""
    project = tmp_path_factory.mktemp("undisturbed") / "stable-scale"
    shutil.copytree(PROJECTS / "stable-scale", project)
    Run(shared_cache).build(project, *FOR_CPU)
    return snapshot(project / "build")


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a build of the CPU variant in a session, whose processes are killed at the end."""
    running: list[tuple[subprocess.Popen[str], Path]] = []

    def run(cache: Path, project: Path, *arguments: str | Path, own_session: bool = True) -> subprocess.Popen[str]:
        options = ["--variant", CPU, "--json"]
        process = subprocess.Popen(
            [BUILDER, "build", project, *options, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(cache),
            start_new_session=own_session,
        )
        running.append((process, cache))
        return process

    yield run
    for process, _ in running:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for _, cache in running:
        for number in working_in(cache):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


@pytest.fixture
def slow_project(copy_project: Copy) -> Path:
    """Return a project with one source that the compiler needs a minute for."""
    project = copy_project("stable-scale")
    append(project / "scale" / "scale_cpu.cpp", SOURCES["slow_source"])
    flags = '["-fconstexpr-loop-limit=2000000000", "-fconstexpr-ops-limit=100000000000"]'
    replace(project / "build.toml", 'language = "cpp-cpu"', f'language = "cpp-cpu"\ncxx-flags = {flags}')
    return project


@pytest.fixture
def scale(copy_project: Callable[..., Path], shared_cache: Path, kernel_builder: Run) -> Callable[..., Path]:
    """Return a function that builds `stable-scale` with workloads; `statement` replaces the kernel's only statement."""

    def make(statement: str = RIGHT) -> Path:
        project = copy_project("stable-scale")
        replace(project / "scale" / "scale_cpu.cpp", RIGHT, statement)
        (project / "benchmarks").mkdir()
        shutil.copy(ROOT / "kernels" / "kit" / "workload.py", project / "benchmarks")
        shutil.copy(ROOT / "tests" / "unit" / "measure" / "scale_benchmark.py", project / "benchmarks" / "benchmark.py")
        kernel_builder.build(project, *FOR_CPU, cache=shared_cache)
        return project

    return make
