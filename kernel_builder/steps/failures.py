"""The errors of failed steps, and of binaries that need a newer C library than their users have."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kernel_builder import elf, toml_file
from kernel_builder.demangle import demangle
from kernel_builder.plural import counted, some_of
from kernel_builder.steps.graph import SYSROOT, Binary, CompileStep, Graph
from kernel_builder.toolchain.stub_libraries import Sysroot
from kernel_format.errors import BuildError, StoreError

# With fewer free bytes on the cache's disk, a full disk is the reason of a failed step.
_LEAST_FREE = 2**20
# The variants and files that an error names; more are counted.
_MOST_NAMES = 4
# The first error of g++ (`f.cpp:1:2: error: ...`), nvcc (`f.cu(1): error: ...`, `ptxas error   : ...`) or the linker.
_FIRST_ERROR = re.compile(
    r"^.*(?:\b(?:error(?:\[E\d+\])?|fatal)\s*:|died due to signal|undefined reference|multiple definition).*$", re.M
)
# A line of the author's code that leads to an error: `from f.cpp:1:` of includes, `f.cpp:7:11:   required from here` of
# templates.
_OWN_LINE = re.compile(r"^(?:(?:In file included| +) *from )?([^\s/:][^\s:]*:\d+)[:,]", re.M)
# clang's request to attach files of the step, which are removed, to a bug report.
_REPORT = re.compile(r"^clang version .*?^\*{20}$.*?^\*{20}\n?", re.M | re.S)
_LONGEST_REASON = 300  # characters


def failure(
    graph: Graph,
    step: CompileStep | Binary,
    directory: Path,
    ninja_output: str,
    cache: Path,
    foreign: Sequence[str] = (),
) -> BuildError:
    """Return the error of a failed step, whose command and whole output the cache keeps as a log.

    Args:
        foreign: The files that a compile step has read and that its key does not cover.

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
    served = ", ".join(variants) if len(variants) <= _MOST_NAMES else f"{len(variants)} variants"
    output = _REPORT.sub("", output)
    if isinstance(step, CompileStep):
        output = re.sub(r"(?<![\w./\"<-])src/", "", output)  # paths relative to the project
    output += "".join(f"reads {name}\n" for name in foreign)
    command = (directory / "command").read_text(errors="surrogateescape")
    kept = _write_log(cache, step.key, f"{step.title}\n\n{command}\n\n{output}")
    hint: str | None = None
    if foreign:
        names = some_of(foreign, _MOST_NAMES)
        message = f"reads {names}, which neither the project nor a toolchain of this variant has"
        hint = "copy the file into the project, and list it in `src`; other machines have another one, or none"
        output = ""
    elif isinstance(step, CompileStep):
        message, hint = f"the compiler failed{_reason(step, output)}", _hint(step, output) or step.compiler.hint
    else:
        message = f"the linker failed{_reason(step, output)}"
    return BuildError(
        f"{message}, for {served or 'a variant'}",
        where=str(step.project / step.source) if isinstance(step, CompileStep) else step.title,
        command=command,
        output=output,
        log=kept,
        hint=hint,
    )


def _write_log(cache: Path, key: str, text: str) -> str | None:
    """Write a log, and return its path; None if it cannot be written."""
    path = cache / "logs" / f"{key}.log"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        return str(path)
    return None


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


def _hint(step: CompileStep, output: str) -> str | None:
    """Return the remedy for a compiler's errors, or None if the table has none."""
    table = toml_file.read(Path(__file__).with_name("failure_hints.toml"))
    is_stable = any(argument.startswith("-DTORCH_TARGET_VERSION") for argument in step.argv)
    for hint in table["hint"]:
        if match := re.search(hint["output"], output):
            names = table["names"]["stable" if is_stable else "full"]
            return str(hint["remedy"]).format(next(filter(None, match.groups()), ""), **names)
    return None


def check_symbols(binary: Binary, path: Path, objects: Mapping[str, Path], graph: Graph) -> None:
    """Raise a BuildError if a binary needs symbols that the oldest supported C library lacks.

    The stub libraries that it was linked against lack such symbols, so they are undefined and have no version.

    Args:
        objects: Source -> its object.
    """
    # A weak symbol may be missing: its users test for it, as Rust's standard library does.
    undefined = {symbol.name for symbol in elf.read(path).undefined if not symbol.weak}
    too_new = Sysroot(binary.roots[SYSROOT], binary.platform).too_new()
    late = sorted(undefined & too_new.keys())
    if late:
        readable = demangle(late)
        contents = {source: file.read_bytes() for source, file in objects.items()}
        # The names of a symbol table end in NUL.
        users = {name: [of for of, data in contents.items() if b"%b\0" % name.encode() in data] for name in late}
        raise BuildError(
            f"needs {counted(len(late), 'symbol')} newer than glibc 2.28, GLIBCXX_3.4.24 and Torch's libgomp "
            f"(GOMP_5.0), for {', '.join(graph.variants_of(binary))}:"
            + "".join(
                f"\n  {readable[name]} ({too_new[name]}), in {', '.join(users[name]) or 'libstdc++.a'}" for name in late
            ),
            where=binary.title,
            hint="call an older function; kernels have to run on machines with glibc 2.28",
        )
