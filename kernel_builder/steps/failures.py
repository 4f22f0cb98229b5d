"""The errors of steps that fail, and of binaries that need a newer C library than users have."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kernel_builder import elf
from kernel_builder.demangle import demangle
from kernel_builder.plural import counted
from kernel_builder.steps.cache import object_path, write_log
from kernel_builder.steps.files_read import FOREIGN
from kernel_builder.steps.graph import SYSROOT, Binary, CompileStep, Graph
from kernel_builder.steps.step_scripts import command_of
from kernel_builder.toolchain.sysroot import Sysroot
from kernel_format.errors import BuildError, StoreError

# With fewer free bytes on the cache's disk, a failed step is blamed on the disk.
_LEAST_FREE = 2**20
# From this number on, variants are counted and not named.
_MANY_VARIANTS = 5
# The first error of g++ (`f.cpp:1:2: error: ...`), nvcc (`f.cu(1): error: ...`, `ptxas error   : ...`) or the linker.
_FIRST_ERROR = re.compile(
    r"^.*(?:\b(?:error|fatal)\s*:|died due to signal|undefined reference|multiple definition).*$", re.M
)
# A line of the author's that leads to an error: `from f.cpp:1:` of includes, `f.cpp:7:11:   required from here` of
# templates.
_OWN_LINE = re.compile(r"^(?:(?:In file included| +) *from )?([^\s/:][^\s:]*:\d+)[:,]", re.M)
# What g++ says of flags, values of flags and headers that another platform has. It puts names in quotes of any kind.
_OF_ONE_PLATFORM = re.compile(
    r"unrecognized command[- ]line option .(-m[\w=.+-]+)|(?:bad|unknown) value .\S+?. (?:for|used with) .(-m\w+)|"
    r"fatal error: (\w+intrin\.h|arm_\w+\.h): No such file"
)
# What g++ makes of a registration by a macro that no header has defined; the source's line follows.
_UNKNOWN_MACRO = re.compile(
    r"error: expected constructor[^\n]*\n[^\n]*\b((?:STABLE_)?TORCH_LIBRARY\w*|REGISTER_EXTENSION)\("
)
_BY_PYBIND11 = re.compile(
    r"PYBIND11_MODULE|/Python\.h\S*: .*error|"
    r"error: '?(?:torch/extension\.h|torch/python\.h|Python\.h|pybind11/|torch/csrc/utils/pybind\.h)"
)
# A member of a class of the stable ABI, all of which are inline functions.
_DECLARED_ONLY = re.compile(r"undefined reference to .torch::stable::(Tensor|Device|Generator)::")
# What clang and ptxas say of flags. ptxas leaves out a dash.
_UNKNOWN_FLAG = re.compile(r"error: unknown argument: '(-[^']+)'|ptxas fatal +: Unknown option '(-[^']+)'")
# What clang asks its users to attach to a report when it or ptxas fails: files of the step, which are removed.
_REPORT = re.compile(r"^clang version .*?^\*{20}$.*?^\*{20}\n?", re.M | re.S)
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
    words = _REPORT.sub("", words)
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
    reason = f": {said[:_LONGEST_REASON]}" if (said := _first_error(step, words)) else ""
    return BuildError(
        f"the {'compiler' if compiled else 'linker'} refused it{reason}, for {served or 'a variant'}",
        where=str(step.project / step.source) if isinstance(step, CompileStep) else step.title,
        command=command,
        output=words,
        log=str(kept) if kept else None,
        hint=(_hint(words, stable=_on_stable_abi(step)) or step.compiler.hint)
        if isinstance(step, CompileStep)
        else _hint_of_linker(words),
    )


def _first_error(step: CompileStep | Binary, words: str) -> str:
    """Return the first error; one in a header of a toolchain with the author's line that leads there."""
    match = _FIRST_ERROR.search(words)
    if not match:
        return ""
    said = match[0].strip()
    for root in sorted(map(str, step.roots.values()), key=len, reverse=True):
        if said.startswith(f"{root}/"):
            leading = list(_OWN_LINE.finditer(words, 0, match.start()))
            return (f"{leading[-1][1]}: " if leading else "") + said.removeprefix(f"{root}/")
    return said


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


def _on_stable_abi(step: CompileStep) -> bool:
    return any(argument.startswith("-DTORCH_TARGET_VERSION") for argument in step.argv)


def _hint_of_linker(words: str) -> str | None:
    match = _DECLARED_ONLY.search(words)
    if not match:
        return None
    header = f"torch/csrc/stable/{match[1].lower()}"
    return f"include {header}.h in that source: {header}_struct.h declares the functions, and does not define them"


def _hint(words: str, *, stable: bool) -> str | None:
    if _KILLED.search(words):
        return "the machine has too little memory for this source; end other programs, or use a machine with more"
    if _BY_PYBIND11.search(words):
        macro, headers = (
            ("STABLE_TORCH_LIBRARY_EXPAND", "torch/csrc/stable/library.h")
            if stable
            else ("TORCH_LIBRARY_EXPAND", "torch/library.h or torch/all.h")
        )
        return (
            f"register the ops by {macro} and REGISTER_EXTENSION of registration.h, and include {headers}, without "
            "PYBIND11_MODULE, torch/extension.h and pybind.h, which need Python.h: one binary serves every Python"
        )
    if match := _UNKNOWN_MACRO.search(words):
        return (
            f"{match[1]} is not known: include registration.h, which the builder provides, and "
            f"{'torch/csrc/stable/library.h' if stable else 'torch/library.h'}"
        )
    if match := _UNKNOWN_FLAG.search(words):
        if match[2]:
            return f"ptxas has no {match[2]}: remove it from `cuda-flags`"
        return (
            f"clang, which compiles the variants of CUDA 12, has no {match[1]}: remove it from `cuda-flags`, or "
            "compile with an nvcc of CUDA 12 (`--cuda-home DIR`), or leave CUDA 12 out by "
            '[general.cuda] minver = "13.0"'
        )
    if match := _OF_ONE_PLATFORM.search(words):
        return (
            f"{match[1] or match[2] or match[3]} is of one platform only: choose the instructions in the source, under "
            "`#if defined(__x86_64__)` or `#if defined(__aarch64__)` and by __attribute__((target(...)))"
        )
    missing = re.search(r"fatal error: (?:([^:\n]+): No such file or directory|'([^'\n]+)' file not found)", words)
    if missing and re.fullmatch(r"\w+", missing[1] or missing[2]):
        name = missing[1] or missing[2]
        return f"the C++ library of this compiler has no <{name}>: do without it, or set CXX to a newer g++"
    if missing:
        return (
            f"{missing[1] or missing[2]} is neither in the project nor in the headers of this variant; list the file "
            "in `src` and its directory in `include`, or with the stable ABI include only torch/csrc/stable and "
            "torch/headeronly, and in a [tvm-ffi] project nothing of Torch"
        )
    return None


def check_symbols(binary: Binary, path: Path, graph: Graph, cache: Path) -> None:
    """Raise a BuildError if a binary needs symbols that the oldest supported C library lacks.

    The libraries that it was linked against leave such symbols out, so they are undefined and have no version.
    """
    undefined = {symbol.name for symbol in elf.read(path).undefined}
    too_new = Sysroot(binary.roots[SYSROOT], binary.platform).too_new()
    late = sorted(undefined & too_new.keys())
    if late:
        raise BuildError(
            f"needs {counted(len(late), 'symbol')} newer than glibc 2.28, GLIBCXX_3.4.24 and Torch's libgomp "
            f"(GOMP_5.0), for {', '.join(graph.variants_of(binary))}:" + "".join(_users(binary, cache, late, too_new)),
            where=binary.title,
            hint="call an older function there; kernels have to run on machines with glibc 2.28",
        )


def _users(binary: Binary, cache: Path, names: Sequence[str], versions: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each symbol and source that refers to it, with the functions that do."""
    callers = [(step.source, elf.callers(object_path(cache, step), names)) for step in binary.objects]
    mangled = {function for _, of in callers for functions in of.values() for function in functions}
    readable = demangle([*names, *mangled])
    for name in names:
        what = f"\n  {readable[name]} ({versions[name]})"
        by = [(source, sorted(readable[f] for f in of[name] if f)) for source, of in callers if name in of]
        for source, functions in by:
            yield f"{what}, in {source}" + (f": called by {', '.join(functions)}" if functions else "")
        if not by:
            yield f"{what}, through the compiler's libstdc++.a"
