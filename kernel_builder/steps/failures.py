"""The errors of failed steps, and of binaries that need a newer C library than their users have."""

from __future__ import annotations

import re
import shutil
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

# With fewer free bytes on the cache's disk, a full disk is the reason of a failed step.
_LEAST_FREE = 2**20
# From this number on, variants are counted and not named.
_MANY_VARIANTS = 5
# The first error of g++ (`f.cpp:1:2: error: ...`), nvcc (`f.cu(1): error: ...`, `ptxas error   : ...`) or the linker.
_FIRST_ERROR = re.compile(
    r"^.*(?:\b(?:error(?:\[E\d+\])?|fatal)\s*:|died due to signal|undefined reference|multiple definition).*$", re.M
)
# A line of the author's code that leads to an error: `from f.cpp:1:` of includes, `f.cpp:7:11:   required from here` of
# templates.
_OWN_LINE = re.compile(r"^(?:(?:In file included| +) *from )?([^\s/:][^\s:]*:\d+)[:,]", re.M)
# g++'s errors for flags, values and headers of another platform. Its quotes depend on the locale.
_OF_ONE_PLATFORM = re.compile(
    r"unrecognized command[- ]line option .(-m[\w=.+-]+)|(?:bad|unknown) value .\S+?. (?:for|used with) .(-m\w+)|"
    r"fatal error: (\w+intrin\.h|arm_\w+\.h): No such file"
)
# g++'s error for a registration by an undefined macro; the source's line follows.
_UNKNOWN_MACRO = re.compile(
    r"error: expected constructor[^\n]*\n[^\n]*\b((?:STABLE_)?TORCH_LIBRARY\w*|REGISTER_EXTENSION)\("
)
_BY_PYBIND11 = re.compile(
    r"PYBIND11_MODULE|/Python\.h\S*: .*error|"
    r"error: '?(?:torch/extension\.h|torch/python\.h|Python\.h|pybind11/|torch/csrc/utils/pybind\.h)"
)
# Errors of clang and ptxas for unknown flags.
_UNKNOWN_FLAG = re.compile(r"error: unknown argument: '(-[^']+)'|ptxas fatal +: Unknown option '(-[^']+)'")
# clang's request to attach files of the step, which are removed, to a bug report.
_REPORT = re.compile(r"^clang version .*?^\*{20}$.*?^\*{20}\n?", re.M | re.S)
_LONGEST_REASON = 300  # characters
_MOST_FILES = 3  # that an error names
# Output of nvcc and g++ when the kernel has killed a compiler for lack of memory.
_KILLED = re.compile(r"died due to signal 9|Killed signal terminated program")


def failure(
    graph: Graph, step: CompileStep | Binary, directory: Path, ninja_output: str, cache: Path | None = None
) -> BuildError:
    """Return the error of a failed step.

    Args:
        cache: The cache that keeps the command and the whole output as a log; None for no log.

    Raises:
        StoreError: If the disk is full.
    """
    log = directory / "log"
    output = log.read_text(errors="replace") if log.exists() else ""
    # On a full disk, the log may be incomplete.
    if "No space left on device" in output or shutil.disk_usage(directory.parent).free < _LEAST_FREE:
        raise StoreError(
            "the disk is full",
            where=str(directory.parent),
            hint="free some space, or set KERNEL_BUILDER_CACHE to a directory on another disk; finished steps are kept",
        )
    if not log.exists():
        return BuildError("ninja could not run the step", where=step.title, output=ninja_output)
    variants = graph.variants_of(step)
    served = ", ".join(variants) if len(variants) < _MANY_VARIANTS else f"{len(variants)} variants"
    output = _REPORT.sub("", output)
    if isinstance(step, CompileStep):
        where = str(step.project / step.source)
        output = re.sub(r"(?<![\w./\"<-])src/", "", output)  # paths relative to the project
    else:
        where = step.title
    foreign = directory / FOREIGN
    files = foreign.read_text(errors="replace").split("\n")[:-1] if foreign.exists() else []
    output += "".join(f"reads {name}\n" for name in files)
    command = command_of(directory)
    kept = write_log(cache, step.key, f"{step.title}\n\n{command}\n\n{output}") if cache else None
    hint: str | None
    if files:
        message = (
            f"reads {', '.join(files[:_MOST_FILES])}{', ...' if files[_MOST_FILES:] else ''}, which neither the "
            f"project nor a toolchain of this variant has"
        )
        hint = "copy the file into the project, and list it in `src`; other machines have another one, or none"
        output = ""
    elif isinstance(step, CompileStep):
        message = f"the compiler failed{_reason(step, output)}"
        hint = _hint(output, stable=_on_stable_abi(step)) or step.compiler.hint
    else:
        message, hint = f"the linker failed{_reason(step, output)}", None
    return BuildError(
        f"{message}, for {served or 'a variant'}",
        where=where,
        command=command,
        output=output,
        log=str(kept) if kept else None,
        hint=hint,
    )


def _reason(step: CompileStep | Binary, output: str) -> str:
    """Return the first error, as a part of a message; for an error in a toolchain's header, with the author's line."""
    match = _FIRST_ERROR.search(output)
    if not match:
        return ""
    error = match[0].strip()
    for root in sorted(map(str, step.roots.values()), key=len, reverse=True):
        if error.startswith(f"{root}/"):
            leading = list(_OWN_LINE.finditer(output, 0, match.start()))
            error = (f"{leading[-1][1]}: " if leading else "") + error.removeprefix(f"{root}/")
            break
    return f": {error[:_LONGEST_REASON]}"


def _on_stable_abi(step: CompileStep) -> bool:
    return any(argument.startswith("-DTORCH_TARGET_VERSION") for argument in step.argv)


def _hint(output: str, *, stable: bool) -> str | None:
    if _KILLED.search(output):
        return (
            "the machine has too little memory: use fewer --jobs, end other programs, or use a machine with more memory"
        )
    if _BY_PYBIND11.search(output):
        macro, headers = (
            ("STABLE_TORCH_LIBRARY_EXPAND", "torch/csrc/stable/library.h")
            if stable
            else ("TORCH_LIBRARY_EXPAND", "torch/library.h or torch/all.h")
        )
        return (
            f"register the ops by {macro} and REGISTER_EXTENSION of registration.h, and include {headers}, without "
            "PYBIND11_MODULE, torch/extension.h and pybind.h, which need Python.h: one binary serves every Python"
        )
    if match := _UNKNOWN_MACRO.search(output):
        return (
            f"{match[1]} is not defined: include registration.h, which the builder provides, and "
            f"{'torch/csrc/stable/library.h' if stable else 'torch/library.h'}"
        )
    if match := _UNKNOWN_FLAG.search(output):
        if match[2]:
            return f"ptxas has no {match[2]}: remove it from `cuda-flags`"
        return (
            f"clang, which compiles the variants of CUDA 12, has no {match[1]}: remove it from `cuda-flags`, or "
            "compile with an nvcc of CUDA 12 (`--cuda-home DIR`), or leave CUDA 12 out by "
            '[general.cuda] minver = "13.0"'
        )
    if match := _OF_ONE_PLATFORM.search(output):
        return (
            f"{match[1] or match[2] or match[3]} is for one platform only: select the instructions in the source, "
            "under `#if defined(__x86_64__)` or `#if defined(__aarch64__)` and by __attribute__((target(...)))"
        )
    missing = re.search(r"fatal error: (?:([^:\n]+): No such file or directory|'([^'\n]+)' file not found)", output)
    if missing and re.fullmatch(r"\w+", missing[1] or missing[2]):
        name = missing[1] or missing[2]
        return f"the C++ library of this compiler has no <{name}>: do not include it, or set CXX to a newer g++"
    if missing:
        return (
            f"{missing[1] or missing[2]} is neither in the project nor in the headers of this variant; list the file "
            "in `src` and its directory in `include`. With the stable ABI, include only torch/csrc/stable and "
            "torch/headeronly; in a [tvm-ffi] project, include no headers of Torch"
        )
    return None


def check_symbols(binary: Binary, path: Path, graph: Graph, cache: Path) -> None:
    """Raise a BuildError if a binary needs symbols that the oldest supported C library lacks.

    The stub libraries that it was linked against lack such symbols, so they are undefined and have no version.
    """
    # A weak symbol may be missing: its users test for it, as Rust's standard library does.
    undefined = {symbol.name for symbol in elf.read(path).undefined if not symbol.weak}
    too_new = Sysroot(binary.roots[SYSROOT], binary.platform).too_new()
    late = sorted(undefined & too_new.keys())
    if late:
        readable = demangle(late)
        objects = {step.source: object_path(cache, step).read_bytes() for step in binary.objects}
        # The names of a symbol table end in NUL.
        users = {name: [source for source, data in objects.items() if b"%b\0" % name.encode() in data] for name in late}
        raise BuildError(
            f"needs {counted(len(late), 'symbol')} newer than glibc 2.28, GLIBCXX_3.4.24 and Torch's libgomp "
            f"(GOMP_5.0), for {', '.join(graph.variants_of(binary))}:"
            + "".join(
                f"\n  {readable[name]} ({too_new[name]}), in {', '.join(users[name]) or 'libstdc++.a'}" for name in late
            ),
            where=binary.title,
            hint="call an older function; kernels have to run on machines with glibc 2.28",
        )
