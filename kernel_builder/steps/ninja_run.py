"""Run the steps of a graph with ninja, except those whose outputs the cache has."""

from __future__ import annotations

import ctypes
import io
import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ninja
from ninja import ninja_syntax

from kernel_builder.progress import Progress
from kernel_builder.steps.cache import check_path, missing, output_path, prune, put
from kernel_builder.steps.confinement import Confinement
from kernel_builder.steps.failures import check_symbols, failure
from kernel_builder.steps.files_read import foreign, listed, readable
from kernel_builder.steps.graph import Binary, CompileStep, Graph, Outcome
from kernel_builder.steps.step_scripts import INSIDE, stage_compile, stage_link
from kernel_builder.toolchain import host_compiler
from kernel_format.errors import BuildError, ToolchainError
from kernel_format.files import temporary_directory, writing
from kernel_sandbox.programs import find_program

# The bytes of a step's output, lists and log, which are read into memory.
_LARGEST_OUTPUT = 4 << 30
# The memory that one compile step may need at its peak: nvcc's optimizer on a large templated source.
_STEP_MEMORY = 1.5 * 2**30

_PR_SET_PDEATHSIG = 1


def default_jobs() -> int:
    """Return the number of compilers to run at a time, by processors and free memory."""
    processors = len(os.sched_getaffinity(0))
    about = Path("/proc/meminfo")  # a change of root may have none
    match = re.search(r"^MemAvailable:\s+(\d+) kB", about.read_text() if about.exists() else "", re.M)
    memory = int(match[1]) * 1024 if match else _STEP_MEMORY
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
    with writing(cache):
        compiles, binaries = missing(graph, cache, shared)
        if not binaries:
            return Outcome()
        check_path(cache)
        (cache / "work").mkdir(parents=True, exist_ok=True)
        with temporary_directory(cache / "work") as work:
            running = _Run(graph, cache, work, jobs, progress or Progress(), idle)
            running.all(compiles, binaries, confinement or Confinement())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    prune(cache)
    return Outcome(
        steps=len(running.ended),
        compiles=sum(isinstance(step, CompileStep) for step in running.ended),
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
    progress: Progress
    idle: Callable[[], None]
    pending: list[CompileStep | Binary] = field(default_factory=list)  # steps that ninja runs, objects first
    ended: list[CompileStep | Binary] = field(default_factory=list)  # those whose outputs are in the cache
    warnings: dict[str, str] = field(default_factory=dict)
    failures: dict[str, BuildError] = field(default_factory=dict)

    def all(self, compiles: Sequence[CompileStep], binaries: Sequence[Binary], confinement: Confinement) -> None:
        """Run these steps, except links whose objects have failed."""
        device_steps = sum(step.compiler.threads is not None for step in compiles)
        threads = max(1, self.jobs // device_steps) if device_steps else 1
        for step in compiles:
            try:
                stage_compile(step, self.work / step.key, threads=threads, confinement=confinement)
                self.pending.append(step)
            except BuildError as error:
                self.failures[step.key] = error
        staged = {step.key for step in self.pending}
        for binary in binaries:
            if not self._lacks_objects(binary):
                objects = [
                    self.work / of.key / "out.o" if of.key in staged else output_path(self.cache, of)
                    for of in binary.objects
                ]
                stage_link(binary, self.work / binary.key, objects, confinement)
                self.pending.append(binary)
        if not self.pending:
            return
        _write_build_file(self.pending, self.work, device_depth=max(1, self.jobs // threads))
        printed = self._ninja()
        for failed in self.pending:
            if not isinstance(failed, Binary) or not self._lacks_objects(failed):
                self.failures[failed.key] = failure(self.graph, failed, self.work / failed.key, printed, self.cache)

    def _lacks_objects(self, binary: Binary) -> bool:
        return any(step.key in self.failures for step in binary.objects)

    def _take_outputs(self) -> None:
        """Put the outputs of the steps that have ended into the cache, or record their errors."""
        for step in [step for step in self.pending if (self.work / step.key / "done").exists()]:
            if isinstance(step, Binary) and self._lacks_objects(step):
                continue
            self.pending.remove(step)
            directory = self.work / step.key
            try:
                self._check(step, directory)
            except BuildError as error:
                self.failures[step.key] = error
                continue
            made = directory / ("out.so" if isinstance(step, Binary) else "out.o")
            put(made.read_bytes(), output_path(self.cache, step))
            self.ended.append(step)

    def _check(self, step: CompileStep | Binary, directory: Path) -> None:
        """Raise a BuildError if an object is of other files than its key covers, or a binary needs a newer system."""
        if sum(path.stat().st_size for path in directory.iterdir()) > _LARGEST_OUTPUT:
            raise BuildError(f"the step has more than {_LARGEST_OUTPUT >> 30} GB of output", where=step.title)
        if isinstance(step, Binary):
            objects = {of.source: output_path(self.cache, of) for of in step.objects}
            check_symbols(step, directory / "out.so", objects, self.graph)
            return
        if refused := foreign(listed(directory), readable(step, directory / INSIDE)):
            raise failure(self.graph, step, directory, "", self.cache, refused)
        if text := (directory / "log").read_text(errors="replace").strip():
            self.warnings[step.title] = text

    def _ninja(self) -> str:
        """Run the build file, take the outputs, and return ninja's own output."""
        libc = ctypes.CDLL(None)
        process = subprocess.Popen(
            [str(find_ninja()), "-j", str(self.jobs), "-k", "0"],
            cwd=self.work,
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
                    finished, total = int(match[1]), int(match[2])
                    self.progress.advance("building", finished, total, detail=match[3])
                    self._take_outputs()
                    if total - finished <= self.jobs and len(self.ended) >= finished:
                        self.idle()
        except BaseException:
            process.terminate()
            raise
        finally:
            process.wait()
            process.stdout.close()
        return "".join(lines)


def _write_build_file(steps: Sequence[CompileStep | Binary], work: Path, *, device_depth: int) -> None:
    """Write `build.ninja`. A step's output is the file `done` in its directory."""
    text = io.StringIO()
    writer = ninja_syntax.Writer(text, width=1000)  # type: ignore[arg-type]  # any text stream
    writer.variable("builddir", ninja_syntax.escape_path(str(work)))
    writer.pool("device", device_depth)
    writer.rule("run", command="sh $script", description="$title")
    staged = {step.key for step in steps}
    for step in steps:
        objects, pool, title = [], None, step.title
        if isinstance(step, Binary):
            objects, title = [f"{of.key}/done" for of in step.objects if of.key in staged], f"link {title}"
        elif step.compiler.threads:
            pool = "device"
        variables = {"script": f"{step.key}/run.sh", "title": ninja_syntax.escape(title)}
        writer.build([f"{step.key}/done"], "run", objects, pool=pool, variables=variables)
    (work / "build.ninja").write_bytes(os.fsencode(text.getvalue()))


def find_ninja() -> Path:
    """Return the ninja program of the PyPI package, or else the one on PATH."""
    program = find_program(f"{ninja.BIN_DIR}/ninja") or find_program("ninja")
    if program is None:
        raise ToolchainError("there is no ninja on this machine", hint="pip install ninja")
    return Path(program)
