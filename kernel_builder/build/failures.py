"""The errors of steps that fail, and of binaries that need a newer C library than users have."""

from __future__ import annotations

import re
import resource
import shutil
from pathlib import Path

from kernel_builder import elf
from kernel_builder.build.cache import write_log
from kernel_builder.build.graph import SYSROOT, Binary, CompileStep, Graph
from kernel_builder.build.step_scripts import FOREIGN, command_of
from kernel_builder.errors import BuildError, StoreError
from kernel_builder.toolchain.sysroot import Sysroot

# With fewer free bytes on the cache's disk, a failed step is blamed on the disk.
_LEAST_FREE = 2**20
# From this number on, variants are counted and not named.
_MANY_VARIANTS = 5
# The first error of g++ (`f.cpp:1:2: error: ...`), nvcc (`f.cu(1): error: ...`, `ptxas error   : ...`) or the linker.
_FIRST_ERROR = re.compile(
    r"^.*(?:\b(?:error|fatal)\s*:|died due to signal|undefined reference|multiple definition).*$", re.M
)
_LONGEST_REASON = 300  # characters
_MOST_FILES = 3  # that an error names
# What nvcc and g++ print when the kernel ends a compiler because memory is short.
_KILLED = re.compile(r"died due to signal 9|Killed signal terminated program")

# What programs print at a resource limit.
_TOO_LARGE = re.compile(r"File size limit exceeded|File too large|signal 25")
_NO_MEMORY = re.compile(
    r"[Cc]annot allocate memory|[Oo]ut of memory|memory exhausted|bad_alloc|failed to map segment|[Cc]annot fork|"
    r"out-of-memory"
)


def failure(
    graph: Graph, step: CompileStep | Binary, directory: Path, ninja_output: str, cache: Path | None = None
) -> BuildError:
    """Return the error for a step that left no output.

    Args:
        cache: Where the command and the whole output are kept as a log; None for nowhere.

    Raises:
        StoreError: If the reason is a full disk.
    """
    log = directory / "log"
    words = log.read_text(errors="replace") if log.exists() else ""
    # A full disk may have no room for the compiler's words either.
    if "No space left on device" in words or shutil.disk_usage(directory.parent).free < _LEAST_FREE:
        raise StoreError(
            "the disk is full",
            where=str(directory.parent),
            hint="free some space, or set KERNEL_BUILDER_CACHE to a directory on another disk; what is built is kept",
        )
    if not log.exists():
        return BuildError("ninja could not run the step", where=step.title, output=ninja_output)
    variants = graph.variants_of(step)
    served = ", ".join(variants) if len(variants) < _MANY_VARIANTS else f"{len(variants)} variants"
    command = command_of(directory)
    # Lines of a compiler cache, which say how it was called and nothing about the source.
    words = re.sub(r"(?m)^sccache: .*\n?", "", words)
    if isinstance(step, CompileStep):
        # Paths as the author knows them, without the directory that the step's copies are in.
        words = re.sub(r"(?<![\w./\"<-])src/", "", words)
    foreign = directory / FOREIGN
    files = foreign.read_text(errors="replace").split("\n")[:-1] if foreign.exists() else []
    words += "".join(f"reads {name}\n" for name in files)
    kept = write_log(cache, step.key, f"{step.title}\n\n{command}\n\n{words}") if cache else None
    if limit := _limit(words):
        raise StoreError(
            f"the step went over a limit that was set for this process and those that it starts: {limit}",
            where=step.title,
            hint="raise the limit in the shell or the container's settings, and build again; what is built is kept",
        )
    compiled = isinstance(step, CompileStep)
    if files:
        return BuildError(
            f"reads {', '.join(files[:_MOST_FILES])}{', ...' if files[_MOST_FILES:] else ''}, which neither the "
            f"project nor a toolchain of this variant has, for {served or 'a variant'}",
            where=str(step.project / step.source) if isinstance(step, CompileStep) else step.title,
            command=command,
            log=str(kept) if kept else None,
            hint="copy the file into the project, and list it in `src`; other machines have another one, or none",
        )
    found = _FIRST_ERROR.search(words)
    reason = f": {found[0].strip()[:_LONGEST_REASON]}" if found else ""
    return BuildError(
        f"the {'compiler' if compiled else 'linker'} refused it{reason}, for {served or 'a variant'}",
        where=str(step.project / step.source) if isinstance(step, CompileStep) else step.title,
        command=command,
        output=words,
        log=str(kept) if kept else None,
        hint=_hint(words) if compiled else None,
    )


def _limit(words: str) -> str | None:
    """Return the resource limit that ended a step, by what its programs printed; None if that was none."""

    def set_to(number: int) -> int | None:
        limit = resource.getrlimit(number)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    size, memory = set_to(resource.RLIMIT_FSIZE), set_to(resource.RLIMIT_AS) or set_to(resource.RLIMIT_DATA)
    if size is not None and _TOO_LARGE.search(words):
        return f"no file may be larger than {size} bytes (ulimit -f)"
    if memory is not None and (not words.strip() or _NO_MEMORY.search(words)):
        return f"no process may have more than {memory >> 20} MiB of memory (ulimit -v)"
    return None


def is_killed(error: BuildError) -> bool:
    """Return whether the kernel ended the compiler, as it does when memory is short."""
    return _KILLED.search(error.output) is not None


def _hint(words: str) -> str | None:
    if _KILLED.search(words):
        return "the machine has too little memory for this source; end other programs, or use a machine with more"
    missing = re.search(r"fatal error: ([^:\n]+): No such file or directory", words)
    if missing:
        return (
            f"{missing[1]} is neither in the project nor in the headers of this variant; list the file in `src` and "
            "its directory in `include`, or with the stable ABI include only torch/csrc/stable and torch/headeronly"
        )
    return None


def check_symbols(binary: Binary, path: Path, graph: Graph) -> None:
    """Raise a BuildError if a binary needs symbols that the oldest supported C library lacks.

    The libraries that it was linked against leave such symbols out, so they are undefined and have no version.
    """
    undefined = {symbol.name for symbol in elf.read(path).undefined}
    too_new = Sysroot(binary.roots[SYSROOT]).too_new()
    late = sorted(undefined & too_new.keys())
    if late:
        named = ", ".join(f"{name} ({too_new[name]})" for name in late[:5])
        raise BuildError(
            f"needs symbols that are newer than glibc 2.28, GLIBCXX_3.4.24 and Torch's libgomp (GOMP_5.0): {named}, "
            f"for {', '.join(graph.variants_of(binary))}",
            where=binary.title,
            hint="use an older function of the library; kernels have to run on machines with glibc 2.28",
        )
