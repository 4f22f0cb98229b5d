"""The command line of g++ for host code, and the common parts of all back ends' command lines.

A command must give the same bytes in every directory and on every machine. Paths are relative to the step's directory,
or tokens for directories that the compiler maps out of `__FILE__`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_builder.backends.tools import HostCompiler, Toolkit
from kernel_builder.config.project import Kernel

# Where clang lists the headers that the compilation for each architecture reads. Its -MD lists those of host code only.
HEADERS_PRINTED = "headers-printed"

CXX_SUFFIXES = frozenset({".cc", ".cpp", ".cxx"})

# Without -ffp-contract=off, GNU's dialects of C++ fuse a product and a sum where the CPU can, and round once.
_CXX_FLAGS = ("-O3", "-DNDEBUG", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")


def token(name: str) -> str:
    """Return the placeholder in commands for a directory outside the step's own. `step_scripts` replaces it."""
    return f"\0{name}\0"


@dataclass(frozen=True)
class Compiler:
    """The properties of a compiler that a step depends on."""

    name: str
    # The option for the number of its threads; None if it has one. Steps of such compilers share a pool.
    threads: str | None = None
    directories: tuple[str, ...] = ()  # directories that it expects in the step's directory
    # How it passes on the option to list the files that the assembler reads, with `{}` for the list. None if its
    # assembler makes no list.
    to_assembler: str | None = "-Wa,--MD,{}"
    environment: Mapping[str, str] | None = None  # variables, with tokens
    portable: bool = True  # whether a step's key covers all that its output depends on, on any machine
    hint: str | None = None  # the remedy for a rejected source for which no other hint fits


GXX = Compiler("g++")


@dataclass(frozen=True)
class CompileOptions:
    """A source, and the common options of all compilers' commands."""

    project: Path  # the directory of the project
    kernel: Kernel  # the table of `build.toml` that lists the source
    where: str  # that table, for errors
    source: str  # the source, relative to the project
    files: tuple[str, ...]  # the source and the project's files that it includes, relative to the project
    # The name that the compilers get instead of the source's path. They derive names of internal symbols from it, so it
    # is different for each use of a source.
    alias: str
    standard: int  # the C++ standard, for example 17
    defines: tuple[str, ...]  # `-D` options
    includes: tuple[str, ...]  # `-I` and `-isystem` options
    roots: Mapping[str, Path]  # token -> the directory it stands for


def gxx(host: HostCompiler, toolkit: Toolkit | None, options: CompileOptions) -> tuple[str, ...]:
    """Return the g++ command for a C++ source, which sees the headers of its back end's toolkit."""
    return (
        str(host.path),
        "-c",
        f"src/{options.source}",
        f"-std=gnu++{options.standard}",
        *_CXX_FLAGS,
        *options.defines,
        *options.includes,
        *(system_includes(token(toolkit.name), toolkit.root, toolkit.include) if toolkit else ()),
        *options.kernel.cxx_flags,
        *path_maps(options.roots),
        f"-frandom-seed={options.alias}",
    )


def without_programs(argv: Sequence[str], host: HostCompiler) -> list[str]:
    """Return a command without the paths of its compilers, which are the machine's own business."""
    machines_own = {ccbin(host), *of_gxx(host)}
    return [part for part in argv[1:] if part not in machines_own]


def system_includes(token: str, root: Path, directories: Sequence[Path]) -> tuple[str, ...]:
    """Return `-isystem` options for directories below `root`, for which `token` stands."""
    below = [directory.relative_to(root).as_posix() for directory in directories]
    return tuple(part for path in below for part in ("-isystem", token if path == "." else f"{token}/{path}"))


def ccbin(host: HostCompiler) -> str:
    """Return nvcc's option for its host compiler."""
    return f"-ccbin={host.path}"


def of_gxx(host: HostCompiler) -> list[str]:
    """Return clang's options for the headers of g++. Each is one word, so that `without_programs` finds it.

    clang's own headers are searched between those of the C++ library and those of the C library, as g++'s are by g++.
    By the directory of the start files, clang learns the release of libgcc, on which atomics of aarch64 depend.
    """
    cxx, c = host.cxx_include, host.c_include
    return [
        f"--gcc-install-dir={host.install}",
        *(f"-stdlib++-isystem{directory}" for directory in cxx),
        *(f"-idirafter{directory}" for directory in c),
        # Of several that fit, the last counts: directories of the C++ library may be inside those of the C library.
        *(f"-ffile-prefix-map={directory}/=g++/" for directory in (*c, *cxx)),
    ]


def path_maps(roots: Mapping[str, Path], option: str = "-fmacro-prefix-map") -> list[str]:
    """Return options that remove directories of this machine from `__FILE__`."""
    names = {token: token.strip("\0") for token in roots}
    return [f"{option}=src/=", *(f"{option}={token}/={name}/" for token, name in names.items())]
