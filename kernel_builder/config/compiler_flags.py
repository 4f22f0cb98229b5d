"""Which of a project's compiler flags are allowed.

A flag is allowed if it neither runs a program, nor loads code into a compiler, nor reads a file that the key of the
compile step does not cover. Flags are known by their form, so that new warnings and optimizations need no entry;
`compiler_flags.toml` has the forms.
nvcc gives the flags of its host compiler to a shell, so they must not mean anything to that either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from kernel_builder import toml_file
from kernel_format.errors import ConfigError

_TABLE: Mapping[str, Any] = toml_file.read(Path(__file__).with_suffix(".toml"))
HOST: tuple[str, ...] = tuple(_TABLE["host"])
_INNER = r"--?[\w-]+(=[\w,.-]+)?|\d+"  # of ptxas and the like
# Characters that a shell changes between the double quotes that nvcc puts around a macro. nvcc doubles no backslash.
_EXPANDED = re.compile(r'[$`]|\\(?!")')
# The value of -Xcompiler has no quotes there.
_PLAIN = re.compile(r"[\w=.:+/%-]*")
_WITH_VALUE = re.compile("|".join(_TABLE["with_value"]))
_PASSED_ON = re.compile(r"(?:-X|--)(compiler|ptxas|fatbin|cudafe|nvlink)(?:-options)?")

# Instructions that not all processors of a platform have. `-march` names the oldest processor.
_INSTRUCTIONS = re.compile(
    r"-m(avx[\w.-]*|s?sse[34][\w.]*|fma4?|f16c|bmi2?|popcnt|gfni|vaes|amx[\w-]*|(arch|cpu)=(?!x86-64$|armv8-a$).*)"
)
_PROJECT_INCLUDE = re.compile(r"(?:-I|--include-path=?)(.*)")


def check(
    root: Path,
    table: str,
    key: str,
    flags: Sequence[str],
    forms: Sequence[str] = HOST,
    by_shell: str | None = None,
    refused: Mapping[str, str] | None = None,
) -> None:
    """Raise a ConfigError if a flag of a table of `build.toml` is not allowed.

    Args:
        forms: Regular expressions for the flags that are.
        by_shell: The compiler, if it gives its flags to a shell.
        refused: Options that are not, whatever the forms say, without their dashes; each with the reason.
    """
    for program, option in single(flags):
        flag = "=".join(option) if option[0].startswith("--") else "".join(option)
        where = f"{root / 'build.toml'}: [{table}] {key}"
        if re.search(r"-(m\w+|arch|gpu-architecture|code|gpu-code)=native\b", flag):
            raise ConfigError(
                f"{flag} makes a binary for the machine that builds it, but the Hub's users have other machines",
                where=where,
                hint="name an instruction set that all users have, or choose at run time: "
                "__attribute__((target(...))) and __builtin_cpu_supports; for CUDA, list cuda-capabilities",
            )
        name = re.match(r"--?([\w-]+)", flag)
        if program is None and refused and name and name[1] in refused:
            raise _refusal(flag, where, refused[name[1]])
        allowed = forms if program is None else HOST if program == "compiler" else (_INNER,)
        if not any(re.fullmatch(form, flag) for form in allowed):
            raise _refusal(flag, where)
        if by_shell and (_EXPANDED.search(flag) if program is None else not _PLAIN.fullmatch(flag)):
            raise ConfigError(
                f"the flag {flag!r} is refused: {by_shell} passes it to a shell, which would change it or run commands",
                where=where,
                hint="define the macro in a header of the project; flags of "
                f"{by_shell} must not contain $, ` or \\, nor other characters of the shell after -Xcompiler",
            )


def notices(table: str, flags: Sequence[str]) -> Iterator[str]:
    """Yield a notice about flags of g++ that limit the processors of a table's binary."""
    if limits := [flag for flag in flags if _INSTRUCTIONS.fullmatch(flag)]:
        yield (
            f"[{table}] cxx-flags: on a processor without the instructions of {' '.join(limits)}, the kernel ends the "
            "process (SIGILL); choose them at run time: __attribute__((target(...))) and __builtin_cpu_supports"
        )


def split_includes(flags: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flags without `-I` for directories inside the project, and these directories."""
    kept: list[str] = []
    directories: list[str] = []
    for option in options(flags):
        match = _PROJECT_INCLUDE.fullmatch("".join(option))
        path = PurePosixPath(match[1]) if match and match[1] else None
        if path is None or path.is_absolute() or ".." in path.parts:
            kept += option
        else:
            directories.append(path.as_posix())
    return tuple(kept), tuple(directories)


def _refusal(flag: str, where: str, known: str | None = None) -> ConfigError:
    reason = known or next((words for words, form in _TABLE["refused"].items() if re.match(form, flag)), None)
    says = reason or "is not among the flags that are known to read no other file and run no other program"
    return ConfigError(
        f"the flag {flag!r} is refused: it {says}",
        where=where,
        hint="remove it; list headers in `include` and `src`, and libraries in `depends`",
    )


def options(flags: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each option with its value, if that is the next argument."""
    words = iter(flags)
    for word in words:
        value = next(words, None) if _WITH_VALUE.fullmatch(word) else None
        yield (word,) if value is None else (word, value)


def single(flags: Sequence[str]) -> Iterator[tuple[str | None, tuple[str, ...]]]:
    """Yield options one by one, each with the program that nvcc passes it on to, or None."""
    for option in options(flags):
        name, _, value = option[0].partition("=")
        passed = _PASSED_ON.fullmatch(name)
        words = (value or "".join(option[1:])).split(",") if passed else ()
        yield from ((passed[1], (word,)) for word in words) if passed else [(None, option)]
