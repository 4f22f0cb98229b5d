"""Runs the steps of a graph with ninja, apart from those whose outputs the cache has."""

from __future__ import annotations

import ctypes
import io
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_builder.build.cache import binary_path, check_path, missing, object_path, prune, work_directory
from kernel_builder.build.failures import check_symbols, failure
from kernel_builder.build.graph import Binary, CompileStep, Graph
from kernel_builder.build.step_scripts import stage_compile, stage_link
from kernel_builder.errors import StoreError, ToolchainError
from kernel_builder.files import locked
from kernel_builder.progress import Progress, Silent
from kernel_builder.toolchain import host_compiler

# The memory that one compile step may need at its peak: nvcc's optimizer on a large templated source.
_STEP_MEMORY = 1.5 * 2**30

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """What running a graph took.

    Attributes:
        steps: How many steps ran: compiles and links.
        compiles: How many of them were compiles.
        cpu_seconds: Processor time of all compilers, user and system; None where a compiler cache's server ran them.
        warnings: Title of a step -> what its compiler printed although it succeeded.
    """

    steps: int
    compiles: int
    cpu_seconds: float | None
    warnings: Mapping[str, str]


def default_jobs() -> int:
    """Return how many compilers to run at a time: as processors and free memory allow."""
    processors = len(os.sched_getaffinity(0))
    try:
        meminfo = Path("/proc/meminfo").read_text()
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.M)
        memory = int(match[1]) * 1024 if match else _STEP_MEMORY
    except OSError:
        memory = _STEP_MEMORY
    return max(1, min(processors, int(memory / _STEP_MEMORY)))


def run(
    graph: Graph, cache: Path, *, jobs: int, compiler_cache: Path | None = None, progress: Progress | None = None
) -> Outcome:
    """Run every step of the graph whose output the cache lacks.

    Args:
        graph: The steps.
        cache: The builder's cache directory, where outputs go.
        jobs: How many processors to use at most.
        compiler_cache: An sccache to put before the compilers.
        progress: Receives the steps as they end, and a line if another build has to be waited for.

    Raises:
        BuildError: If a step fails; it carries the command and the compiler's words.
        StoreError: If the cache cannot be written.
        ToolchainError: If ninja is missing.
    """
    progress = progress or Silent()
    if not missing(graph, cache)[1]:
        return Outcome(0, 0, 0.0, {})
    check_path(cache)

    def waiting() -> None:
        progress.say("another build is using the compilers; waiting for it")

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / "build.lock", waiting=waiting), work_directory(cache) as work:
            return _run(graph, cache, work, jobs, compiler_cache, progress)
    except OSError as error:
        raise StoreError(
            f"the cache cannot be written: {error.strerror}",
            where=str(error.filename or cache),
            hint="free some space, or set KERNEL_BUILDER_CACHE to a directory that can be written",
        ) from error


def compile_alone(step: CompileStep, work: Path, output: Path, threads: int) -> None:
    """Run one compile step without ninja or a cache.

    Args:
        work: An empty directory to work in.
        output: The object, which appears when it is whole.
        threads: How many processors to use at most.

    Raises:
        BuildError: If the compiler fails; it carries the command and the compiler's words.
        StoreError: If the disk is full.
    """
    check_path(work)
    stage_compile(step, work / step.key, output, threads=threads)
    environment = _environment(work)
    subprocess.run(["sh", f"{step.key}/run.sh"], cwd=work, env=environment, check=False)
    if not output.exists():
        raise failure(Graph(()), step, work / step.key, "")


def _run(graph: Graph, cache: Path, work: Path, jobs: int, compiler_cache: Path | None, progress: Progress) -> Outcome:
    # Asked again with the lock held: the build that was waited for may have made what was missing.
    compiles, binaries = missing(graph, cache)
    device_steps = sum(step.tool == "cuda" for step in compiles)
    threads = max(1, jobs // device_steps) if device_steps else 1
    for step in compiles:
        output = object_path(cache, step)
        stage_compile(step, work / step.key, output, compiler_cache=compiler_cache, threads=threads)
    for binary in binaries:
        stage_link(binary, work / binary.key, cache)
    _write_build_file(compiles, binaries, work, device_depth=max(1, jobs // threads))

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output_of_ninja = _ninja(work, jobs, compiler_cache, cache, progress)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    steps: list[CompileStep | Binary] = [*compiles, *binaries]
    failed = [step for step in steps if not (work / step.key / "done").exists()]
    if failed:
        # Ninja starts no further step after one has failed. A step that never ran has no log.
        first = next((step for step in failed if (work / step.key / "log").exists()), failed[0])
        raise failure(graph, first, work / first.key, output_of_ninja)
    for binary in binaries:
        linked = work / binary.key / "out.so"
        check_symbols(binary, linked, graph)
        binary_path(cache, binary).parent.mkdir(parents=True, exist_ok=True)
        linked.replace(binary_path(cache, binary))
    prune(graph, cache)
    return Outcome(
        steps=len(steps),
        compiles=len(compiles),
        cpu_seconds=None if compiler_cache else (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime),
        warnings=_warnings(compiles, work),
    )


def _warnings(compiles: Sequence[CompileStep], work: Path) -> dict[str, str]:
    logs = {step.title: (work / step.key / "log").read_text(errors="replace").strip() for step in compiles}
    return {title: text for title, text in logs.items() if text}


def _write_build_file(
    compiles: Sequence[CompileStep], binaries: Sequence[Binary], work: Path, *, device_depth: int
) -> None:
    """Write `build.ninja`. A step's output is the file `done` in its directory.

    Ninja removes the outputs of steps that it stops. Those in the cache could be another build's by then.
    """
    from ninja import ninja_syntax

    text = io.StringIO()
    writer = ninja_syntax.Writer(text, width=1000)  # type: ignore[arg-type]  # a stream, whatever its stub says
    writer.variable("builddir", ninja_syntax.escape_path(str(work)))
    writer.pool("device", device_depth)
    writer.rule("run", command="sh $script", description="$title")
    staged = {step.key for step in compiles}

    def add(step: CompileStep | Binary, title: str, pool: str | None = None, inputs: Sequence[str] = ()) -> None:
        variables = {"script": f"{step.key}/run.sh", "title": ninja_syntax.escape(title)}
        writer.build([f"{step.key}/done"], "run", list(inputs), pool=pool, variables=variables)

    for step in compiles:
        add(step, step.title, pool="device" if step.tool == "cuda" else None)
    for binary in binaries:
        objects = [f"{step.key}/done" for step in binary.objects if step.key in staged]
        add(binary, f"link {binary.title}", inputs=objects)
    (work / "build.ninja").write_bytes(os.fsencode(text.getvalue()))


def find_ninja() -> Path:
    """Return the ninja program: the one of the PyPI package, else the one on the PATH.

    Raises:
        ToolchainError: If there is none.
    """
    import ninja

    found = shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")
    if found is None:
        raise ToolchainError("there is no ninja on this machine", hint="pip install ninja")
    return Path(found)


def _environment(work: Path) -> dict[str, str]:
    """Return the environment of the steps. Temporary files go below `work`, and are removed with it."""
    (work / "tmp").mkdir()
    return {**host_compiler.environment(), "TMPDIR": str(work / "tmp")}


def _start_server(compiler_cache: Path, cache: Path) -> None:
    """Start the server of a compiler cache if it is not running.

    It outlives the build, so it must not use the temporary directory of the steps. It leaves the cache's path out of
    its keys, so that machines whose caches lie elsewhere can share its results.
    """
    environment = {"SCCACHE_BASEDIRS": str(cache), **host_compiler.environment()}
    start = [str(compiler_cache), "--start-server"]
    subprocess.run(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, env=environment)


def _ninja(work: Path, jobs: int, compiler_cache: Path | None, cache: Path, progress: Progress) -> str:
    """Run the build file, and return all that ninja prints."""
    if compiler_cache is not None:
        _start_server(compiler_cache, cache)
    libc = ctypes.CDLL(None)
    process = subprocess.Popen(
        [str(find_ninja()), "-C", str(work), "-j", str(jobs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**_environment(work), "NINJA_STATUS": "[%f/%t] "},
        # Ninja ends its compilers when it is told to end, which the kernel does if this process is killed.
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509
    )
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if match := re.match(r"\[(\d+)/(\d+)\] (.*)", line):
                progress.advance("building", int(match[1]), int(match[2]), detail=match[3])
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait()
        process.stdout.close()
    return "".join(lines)
