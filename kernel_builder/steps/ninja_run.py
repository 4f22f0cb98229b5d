"""Run the steps of a graph with ninja, except those whose outputs the cache has."""

from __future__ import annotations

import ctypes
import io
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ninja
from ninja import ninja_syntax

from kernel_builder.progress import Progress, Silent
from kernel_builder.steps.cache import (
    binary_path,
    check_path,
    missing,
    object_path,
    prune,
    put,
    work_directory,
)
from kernel_builder.steps.confinement import Confinement
from kernel_builder.steps.failures import check_symbols, failure
from kernel_builder.steps.graph import Binary, CompileStep, Graph, Outcome
from kernel_builder.steps.step_scripts import linked, stage_compile, stage_link
from kernel_builder.toolchain import host_compiler
from kernel_format.errors import BuildError, StoreError, ToolchainError

# The memory that one compile step may need at its peak: nvcc's optimizer on a large templated source.
_STEP_MEMORY = 1.5 * 2**30

_PR_SET_PDEATHSIG = 1


def default_jobs() -> int:
    """Return the number of compilers to run at a time, by processors and free memory."""
    processors = len(os.sched_getaffinity(0))
    try:
        meminfo = Path("/proc/meminfo").read_text()
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.M)
        memory = int(match[1]) * 1024 if match else _STEP_MEMORY
    except OSError:
        memory = _STEP_MEMORY
    return max(1, min(processors, int(memory / _STEP_MEMORY)))


def run(
    graph: Graph,
    cache: Path,
    *,
    jobs: int,
    shared: Path | None = None,
    confinement: Confinement | None = None,
    progress: Progress | None = None,
    idle: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run every step of the graph whose output the cache lacks. A failed step does not stop the others.

    Args:
        jobs: The most processors to use.
        shared: A second cache, which is only read.
        confinement: The sandbox of compilers and linkers; None for none.
        idle: Called, perhaps repeatedly, when no more steps remain than processors, to start other work. It is not
            called before a step has succeeded, or after one has failed.

    Raises:
        StoreError: If the cache cannot be written.
        ToolchainError: If ninja is missing.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        compiles, binaries = missing(graph, cache, shared)
        if not binaries:
            return Outcome()
        check_path(cache)
        with work_directory(cache) as work:
            running = _Run(graph, cache, work, jobs, confinement or Confinement(), progress or Silent(), idle)
            running.all(compiles, binaries)
    except OSError as error:
        raise StoreError(
            f"the cache cannot be written: {error.strerror}",
            where=str(error.filename or cache),
            hint="free some space, or set KERNEL_BUILDER_CACHE to a directory that can be written",
        ) from error
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    prune(graph, cache)
    return Outcome(
        steps=running.steps,
        compiles=running.compiles,
        cpu_seconds=(after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime),
        warnings=running.warnings,
        failures=running.failures,
    )


@dataclass
class _Run:
    """The state of one run of a graph, with the arguments of `run`."""

    graph: Graph
    cache: Path
    work: Path
    jobs: int
    confinement: Confinement
    progress: Progress
    idle: Callable[[], None]
    steps: int = 0
    compiles: int = 0
    warnings: dict[str, str] = field(default_factory=dict)
    failures: dict[str, BuildError] = field(default_factory=dict)

    def all(self, compiles: Sequence[CompileStep], binaries: Sequence[Binary]) -> None:
        """Run these steps, except links whose objects have failed."""
        threads = self._threads(compiles)
        compiles = [step for step in compiles if self._is_staged(step, threads)]
        binaries = [binary for binary in binaries if not self._has_failed(binary)]
        for binary in binaries:
            stage_link(binary, self.work / binary.key, self.cache, self.confinement)
        steps: list[CompileStep | Binary] = [*compiles, *binaries]
        if not steps:
            return
        _write_build_file(compiles, binaries, self.work, device_depth=max(1, self.jobs // threads))
        printed = self._ninja()
        for step in steps:
            if not isinstance(step, Binary) or not self._has_failed(step):
                self._end(step, printed)

    def _threads(self, compiles: Sequence[CompileStep]) -> int:
        device_steps = sum(step.compiler.threads is not None for step in compiles)
        return max(1, self.jobs // device_steps) if device_steps else 1

    def _is_staged(self, step: CompileStep, threads: int) -> bool:
        output = object_path(self.cache, step)
        try:
            stage_compile(step, self.work / step.key, output, threads=threads, confinement=self.confinement)
        except BuildError as error:
            self.failures[step.key] = error
            return False
        return True

    def _has_failed(self, binary: Binary) -> bool:
        return any(key in self.failures for key in (binary.key, *(step.key for step in binary.objects)))

    def _end(self, step: CompileStep | Binary, printed: str) -> None:
        """Count a step and put a linked binary into the cache, or record its error."""
        directory = self.work / step.key
        if not (directory / "done").exists():
            self.failures[step.key] = failure(self.graph, step, directory, printed, self.cache)
            return
        self.steps += 1
        if isinstance(step, CompileStep):
            self.compiles += 1
            if text := (directory / "log").read_text(errors="replace").strip():
                self.warnings[step.title] = text
            return
        try:
            check_symbols(step, linked(directory), self.graph, self.cache)
        except BuildError as error:
            self.failures[step.key] = error
            return
        put(linked(directory), binary_path(self.cache, step))

    def _ninja(self) -> str:
        """Run the build file, and return ninja's output."""
        libc = ctypes.CDLL(None)
        process = subprocess.Popen(
            [str(find_ninja()), "-C", str(self.work), "-j", str(self.jobs), "-k", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**host_compiler.environment(), "NINJA_STATUS": "[%f/%t] "},
            # If this process is killed, the kernel sends SIGTERM to ninja, which then terminates its compilers.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509
        )
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if match := re.match(r"\[(\d+)/(\d+)\] (.*)", line):
                    ended, total = int(match[1]), int(match[2])
                    self.progress.advance("building", ended, total, detail=match[3])
                    has_failed = len(list(self.work.glob("*/done"))) < ended
                    if total - ended <= self.jobs and not has_failed:
                        self.idle()
        except BaseException:
            process.terminate()
            raise
        finally:
            process.wait()
            process.stdout.close()
        return "".join(lines)


def _write_build_file(
    compiles: Sequence[CompileStep], binaries: Sequence[Binary], work: Path, *, device_depth: int
) -> None:
    """Write `build.ninja`. A step's output is the file `done` in its directory.

    Ninja removes the outputs of steps that it stops; outputs in the cache could belong to another build by then.
    """
    text = io.StringIO()
    writer = ninja_syntax.Writer(text, width=1000)  # type: ignore[arg-type]  # any text stream
    writer.variable("builddir", ninja_syntax.escape_path(str(work)))
    writer.pool("device", device_depth)
    writer.rule("run", command="sh $script", description="$title")
    staged = {step.key for step in compiles}

    def add(step: CompileStep | Binary, title: str, pool: str | None = None, inputs: Sequence[str] = ()) -> None:
        variables = {"script": f"{step.key}/run.sh", "title": ninja_syntax.escape(title)}
        writer.build([f"{step.key}/done"], "run", list(inputs), pool=pool, variables=variables)

    for step in compiles:
        add(step, step.title, pool="device" if step.compiler.threads else None)
    for binary in binaries:
        objects = [f"{step.key}/done" for step in binary.objects if step.key in staged]
        add(binary, f"link {binary.title}", inputs=objects)
    (work / "build.ninja").write_bytes(os.fsencode(text.getvalue()))


def find_ninja() -> Path:
    """Return the ninja program of the PyPI package, or else the one on PATH."""
    program = shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")
    if program is None:
        raise ToolchainError("there is no ninja on this machine", hint="pip install ninja")
    return Path(program)
