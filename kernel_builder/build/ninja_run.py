"""Graph -> build.ninja, run, progress.

Outputs are named by content and live in the cache: a step whose output exists is not in the build file at all, and an
output appears only when it is whole. Everything else a step makes is in a directory of its own, which is made anew
when the step runs, so a killed build leaves nothing that a later one could mistake for a result.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_builder.build import include_scan
from kernel_builder.build.plan import PLACEHOLDER, STEP, SYSROOT, Binary, Compile, Graph
from kernel_builder.errors import BuildError, StoreError, ToolchainError
from kernel_builder.toolchain import host_compiler
from kernel_builder.toolchain.sysroot import Sysroot

# What one compile step is taken to need at its peak: nvcc's optimiser on a large templated source.
_STEP_MEMORY = 1.5 * 2**30

# Outputs that no build has used for so long are removed; they can be made again.
_KEEP_SECONDS = 30 * 24 * 3600

# With fewer free bytes on the disk of the cache, a step is taken to have failed for want of them.
_LEAST_FREE = 2**20

_PR_SET_PDEATHSIG = 1

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and the title of the step that ended last."""


@dataclass(frozen=True)
class Outcome:
    """What running a graph took.

    Attributes:
        split: The compiler took the op namespace's placeholder apart in some object. The binaries that need it were
            not linked; the graph has to be planned and run again.
        steps: How many steps ran: compiles and links.
        compiles: How many of them were compiles.
        cpu_seconds: Processor time of all compilers, user and system; None where a compiler cache's server ran them.
        warnings: Title of a step -> what its compiler said though it succeeded.
    """

    steps: int
    compiles: int
    cpu_seconds: float | None
    warnings: Mapping[str, str]
    split: bool = False


def object_path(cache: Path, step: Compile) -> Path:
    return cache / "objects" / step.key[:2] / f"{step.key}.o"


def split_path(cache: Path, key: str) -> Path:
    """A file that says of a compile step that its object has the op namespace's placeholder in pieces."""
    return cache / "objects" / key[:2] / f"{key}.split"


def binary_path(cache: Path, binary: Binary) -> Path:
    return cache / "binaries" / binary.key[:2] / f"{binary.key}.so"


def default_jobs() -> int:
    """As many compilers as there are processors for this process, and as fit into the memory that is free."""
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
    compiler_cache: Path | None = None,
    progress: Progress | None = None,
    waiting: Callable[[], None] | None = None,
) -> Outcome:
    """Run every step of the graph whose output the cache lacks.

    Args:
        graph: The steps.
        cache: The builder's cache directory, where outputs go.
        jobs: How many processors to use at most.
        compiler_cache: An sccache to put before the compilers.
        progress: Called as steps end.
        waiting: Called once if another build is using the cache, before waiting for it.

    Raises:
        BuildError: If a step fails; it carries the command and the compiler's words.
        StoreError: If the cache cannot be written.
        ToolchainError: If ninja is missing.
    """
    if not _missing(graph, cache)[1]:
        return Outcome(0, 0, 0.0, {})
    _refuse_unsafe(cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "build.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting:
                    waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return _run(graph, cache, jobs, compiler_cache, progress, lock.fileno())
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)
    except OSError as error:
        raise StoreError(
            f"the cache cannot be written: {error.strerror}",
            where=str(error.filename or cache),
            hint="free some space, or set KERNEL_BUILDER_CACHE to a directory that can be written",
        ) from error


def _refuse_unsafe(cache: Path) -> None:
    # nvcc takes its options apart at commas and white space, with no quoting that survives all of its steps.
    if re.search(r"[\s,;:'\"\\$`]", str(cache)):
        raise StoreError(
            "compilers cannot work in a directory whose path has white space, quotes, commas, colons or backslashes",
            where=str(cache),
            hint="set KERNEL_BUILDER_CACHE to a plain path; project directories may have any name",
        )


def compile_alone(step: Compile, work: Path, output: Path, threads: int) -> None:
    """Run one compile step without ninja or a cache.

    Args:
        work: An empty directory to work in.
        output: The object, which appears when it is whole.
        threads: How many processors to use at most.

    Raises:
        BuildError: If the compiler fails; it carries the command and the compiler's words.
        StoreError: If the disk is full.
    """
    _refuse_unsafe(work)
    _stage_compile(step, work, output, None, threads)
    subprocess.run(["sh", str(work / step.key / "run.sh")], env=_environment(work), check=False)
    if not output.exists():
        raise _failure(Graph(()), step, work, "")


def _missing(graph: Graph, cache: Path) -> tuple[list[Compile], list[Binary]]:
    binaries = [binary for binary in graph.binaries if not binary_path(cache, binary).exists()]
    needed = {step.key: step for binary in binaries for step in binary.objects}
    return [step for step in needed.values() if not object_path(cache, step).exists()], binaries


def _run(
    graph: Graph, cache: Path, jobs: int, compiler_cache: Path | None, progress: Progress | None, lock: int
) -> Outcome:
    # Asked again, now that no other build is at work: it may have made what was missing.
    compiles, binaries = _missing(graph, cache)
    steps: list[Compile | Binary] = [*compiles, *binaries]
    work = cache / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    device_steps = sum(step.tool == "cuda" for step in compiles)
    threads = max(1, jobs // device_steps) if device_steps else 1
    for step in compiles:
        _stage_compile(step, work, object_path(cache, step), compiler_cache, threads)
    for binary in binaries:
        _stage_link(binary, work, cache)
    _write_build_file(compiles, binaries, work, cache, max(1, jobs // threads))

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = _ninja(work, jobs, compiler_cache, cache, lock, lambda line: _report(line, progress))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    split = _mark_split(binaries, work, cache)
    made = [object_path(cache, step) for step in compiles] + [_linked(work, binary) for binary in binaries]
    for one, path in zip(steps, made, strict=True):
        if not path.exists() and not split:
            raise _failure(graph, one, work, output)
    if not split:
        for binary in binaries:
            _refuse_too_new(binary, _linked(work, binary), graph)
            _linked(work, binary).replace(binary_path(cache, binary))
    warnings = {
        step.title: text
        for step in compiles
        if (log := work / step.key / "log").exists() and (text := log.read_text(errors="replace").strip())
    }
    shutil.rmtree(work, ignore_errors=True)
    _forget_unused(graph, cache)
    return Outcome(
        steps=len(steps),
        compiles=len(compiles),
        cpu_seconds=None if compiler_cache else (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime),
        warnings=warnings,
        split=split,
    )


def _forget_unused(graph: Graph, cache: Path) -> None:
    """Keep the cache from growing for ever."""
    used = [object_path(cache, step) for step in graph.compiles] + [binary_path(cache, one) for one in graph.binaries]
    for path in used:
        if path.exists():
            os.utime(path)
    oldest = time.time() - _KEEP_SECONDS
    for folder in ("objects", "binaries", "packages"):
        for path in (cache / folder).rglob("*"):
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)


def _linked(work: Path, binary: Binary) -> Path:
    """Where a link leaves its binary, which is looked at before it goes to the cache."""
    return work / binary.key / "out.so"


def _mark_split(binaries: Sequence[Binary], work: Path, cache: Path) -> bool:
    """Note the objects whose placeholder the links found in pieces; whether there are any."""
    found = False
    for binary in binaries:
        for number, step in enumerate(binary.objects):
            if (work / binary.key / f"{number}.split").exists():
                split_path(cache, step.key).touch()
                found = True
    return found


def _with_paths(argv: Sequence[str], directory: Path, roots: Mapping[str, Path]) -> list[str]:
    paths = {STEP: directory, **roots}
    rendered = list(argv)
    for token, path in paths.items():
        rendered = [part.replace(token, str(path)) for part in rendered]
    return rendered


def _write(directory: Path, name: str, content: bytes) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (0, 0))  # __TIMESTAMP__ is the time of the file


def _script(directory: Path, commands: Sequence[str]) -> None:
    """A step's `run.sh`: its commands, one after the other, with all they say in `log`."""
    lines = ["#!/bin/sh", "set -e", f"cd {shlex.quote(str(directory))}", "exec >> log 2>&1", *commands]
    _write(directory, "run.sh", os.fsencode("\n".join(lines) + "\n"))


def _stage_compile(step: Compile, work: Path, output: Path, compiler_cache: Path | None, threads: int) -> None:
    directory = work / step.key
    for name, expected in step.files:
        _write(directory, f"src/{name}", include_scan.read_unchanged(step.project / name, expected))
    for name, text in step.generated.items():
        _write(directory, name, text.encode())
    output.parent.mkdir(parents=True, exist_ok=True)
    command = _with_paths(step.argv, directory, step.roots)
    if step.tool == "cuda":
        (directory / "keep").mkdir()
        if threads > 1 and compiler_cache is None:
            command.append(f"--threads={threads}")
    compile_it = shlex.join([*command, "-o", "out.o"])
    if compiler_cache is not None:
        # A compiler cache may fail where the compiler does not (a server that went away, a full disk of its own).
        compile_it = f"{shlex.quote(str(compiler_cache))} {compile_it} || {{ : > log; {compile_it}; }}"
    _script(directory, [compile_it, f"mv -f out.o {shlex.quote(str(output))}"])


def _stage_link(binary: Binary, work: Path, cache: Path) -> None:
    directory = work / binary.key
    for name, text in binary.generated.items():
        _write(directory, name, text.encode())
    binary_path(cache, binary).parent.mkdir(parents=True, exist_ok=True)
    unique = binary.module.rpartition("_")[2]
    pieces = " ".join(f"-e {PLACEHOLDER[start : start + 4]}" for start in range(len(PLACEHOLDER) - 3))
    commands = []
    objects = []
    for number, step in enumerate(binary.objects):
        path = shlex.quote(str(object_path(cache, step)))
        if step.placeholder:
            commands.append(f"LC_ALL=C sed s/{PLACEHOLDER}/{unique}/g {path} > {number}.o")
            commands.append(f"if LC_ALL=C grep -aqF {pieces} {number}.o; then touch {number}.split; exit 1; fi")
            objects.append(f"{number}.o")
        else:
            objects.append(path)
    argv = _with_paths(binary.argv, directory, binary.roots)
    torch = ["-Wl,--no-as-needed", *(f"-l:{name}" for name in binary.libraries)]
    runtime = Sysroot(binary.roots[SYSROOT]).runtime_arguments
    link = [shlex.join([str(binary.cxx), *argv]), *objects, shlex.join([*torch, *runtime]), "-o out.so"]
    commands.append(" ".join(link))
    _script(directory, commands)


def _write_build_file(
    compiles: Sequence[Compile], binaries: Sequence[Binary], work: Path, cache: Path, device_depth: int
) -> None:
    from ninja import ninja_syntax

    text = io.StringIO()
    writer = ninja_syntax.Writer(text, width=1000)  # type: ignore[arg-type]  # a stream, whatever its stub says
    writer.variable("builddir", ninja_syntax.escape_path(str(work)))
    writer.pool("device", device_depth)
    writer.rule("run", command="sh $script", description="$title")
    for step in compiles:
        script = str(work / step.key / "run.sh")
        writer.build(
            [str(object_path(cache, step))],
            "run",
            pool="device" if step.tool == "cuda" else None,
            variables={"script": ninja_syntax.escape(shlex.quote(script)), "title": ninja_syntax.escape(step.title)},
        )
    for binary in binaries:
        script = str(work / binary.key / "run.sh")
        writer.build(
            [str(_linked(work, binary))],
            "run",
            [str(object_path(cache, step)) for step in binary.objects],
            variables={
                "script": ninja_syntax.escape(shlex.quote(script)),
                "title": ninja_syntax.escape(f"link {binary.title}"),
            },
        )
    (work / "build.ninja").write_bytes(os.fsencode(text.getvalue()))


def find_ninja() -> Path:
    """The ninja program: the one of the PyPI package, else the one on the path.

    Raises:
        ToolchainError: If there is none.
    """
    import ninja

    found = shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")
    if found is None:
        raise ToolchainError("there is no ninja on this machine", hint="pip install ninja")
    return Path(found)


def _environment(work: Path) -> dict[str, str]:
    """The environment of the steps, with a directory for temporary files that is made now."""
    (work / "tmp").mkdir()
    # What killed compilers leave goes with the rest.
    return {**host_compiler.environment(), "TMPDIR": str(work / "tmp")}


def _ninja(
    work: Path,
    jobs: int,
    compiler_cache: Path | None,
    cache: Path,
    lock: int,
    each_line: Callable[[str], None],
) -> str:
    """Run the build file, and return all that ninja says.

    Ninja and the compilers inherit `lock`, the descriptor of the lock on the cache: should they outlive this process,
    a later build waits for them instead of working in the same directories.
    """
    environment = {**_environment(work), "NINJA_STATUS": "[%f/%t] "}
    if compiler_cache is not None:
        environment.setdefault("SCCACHE_BASEDIRS", str(cache))
        # Its server outlives the build, so it must be no child of a step, which has the lock. It may be running.
        start = [str(compiler_cache), "--start-server"]
        subprocess.run(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, env=environment)
    libc = ctypes.CDLL(None)
    process = subprocess.Popen(
        [str(find_ninja()), "-C", str(work), "-j", str(jobs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        pass_fds=[lock],
        # Ninja ends its compilers when it is told to end, which the kernel does if this process is killed.
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509
    )
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            each_line(line)
    except BaseException:
        process.terminate()
        raise
    finally:
        process.wait()
        process.stdout.close()
    return "".join(lines)


def _report(line: str, progress: Progress | None) -> None:
    match = re.match(r"\[(\d+)/(\d+)\] (.*)", line)
    if match and progress:
        progress(int(match[1]), int(match[2]), match[3])


def _failure(graph: Graph, step: Compile | Binary, work: Path, ninja_output: str) -> BuildError:
    """The error for the first step without output; a link waits for its objects, so compiles come first."""
    directory = work / step.key
    log = directory / "log"
    if not log.exists():
        return BuildError("ninja could not run the step", where=step.title, output=ninja_output)
    words = log.read_text(errors="replace").replace(f"{directory}/src/", "")
    # A full disk may have no room for the compiler's words either.
    if "No space left on device" in words or shutil.disk_usage(work).free < _LEAST_FREE:
        raise StoreError(
            "the disk is full",
            where=str(work),
            hint="free some space, or set KERNEL_BUILDER_CACHE to a directory on another disk; what is built is kept",
        )
    variants = ", ".join(graph.variants_of(step)) or "a variant"
    command = os.fsdecode((directory / "run.sh").read_bytes()).splitlines()[4:]
    if isinstance(step, Compile):
        return BuildError(
            f"the compiler refused it, for {variants}",
            where=str(step.project / step.source),
            command="\n".join(command),
            output=words,
            hint=_hint(words),
        )
    return BuildError(
        f"the linker refused it, for {variants}", where=step.title, command="\n".join(command), output=words
    )


def _hint(words: str) -> str | None:
    missing = re.search(r"fatal error: ([^:\n]+): No such file or directory", words)
    if missing:
        return (
            f"{missing[1]} is neither in the project nor in the headers of this variant; list the file in `src` and "
            "its directory in `include`, or with the stable ABI include only torch/csrc/stable and torch/headeronly"
        )
    return None


def _refuse_too_new(binary: Binary, path: Path, graph: Graph) -> None:
    """Refuse a binary that needs what the oldest supported C library lacks.

    Such symbols were left out of what it was linked against, so they are undefined, with no version.
    """
    from elftools.elf.elffile import ELFFile
    from elftools.elf.sections import SymbolTableSection

    with path.open("rb") as stream:
        table = ELFFile(stream).get_section_by_name(".dynsym")
        assert isinstance(table, SymbolTableSection)
        undefined = {symbol.name for symbol in table.iter_symbols() if symbol["st_shndx"] == "SHN_UNDEF"}
    too_new = Sysroot(binary.roots[SYSROOT]).too_new()
    late = sorted(undefined & too_new.keys())
    if late:
        named = ", ".join(f"{name} ({too_new[name]})" for name in late[:5])
        raise BuildError(
            f"needs symbols that are newer than glibc 2.28 and GLIBCXX_3.4.24: {named}, "
            f"for {', '.join(graph.variants_of(binary))}",
            where=binary.title,
            hint="use an older function of the C or C++ library; kernels have to run on machines with glibc 2.28",
        )
