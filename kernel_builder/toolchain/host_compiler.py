"""Finds the user's g++ for a platform, checks that it can be used, and identifies it by its content.

The identity of a host compiler stands for its own headers and those of the C library, and no others. /usr/include also
has headers of other packages, which differ from machine to machine, so the C library's are known by their names. A
header of such a name in /usr/local would take the place of the C library's, so none of that directory is accepted.
"""

from __future__ import annotations

import hashlib
import os
import platform as _platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.backends.tools import HostCompiler
from kernel_builder.config.variant import this_platform
from kernel_builder.probe_cache import ProbeCache, output_of
from kernel_format.errors import ToolchainError
from kernel_sandbox.programs import find_program

# Environment variables that the compilers get from the user. All others may change the output of g++, ld or nvcc
# (CPATH, NVCC_APPEND_FLAGS, PTXAS_FLAGS, ...), which must depend on the command and its inputs alone.
_KEPT = (
    "PATH",
    "LD_LIBRARY_PATH",  # the compilers of GCC toolsets need theirs
    "HOME",
    "USER",
    "TMPDIR",
    "NIX_(BINTOOLS|CC)(_WRAPPER_TARGET_.*|_FOR_.*)?",  # for Nix's compiler wrappers
)

OLDEST = 11  # GCC's major version

_HINT = (
    "install g++ 11 or newer (Debian, Ubuntu: `apt-get install g++`; Fedora, RHEL: `dnf install gcc-c++`, or "
    "`dnf install gcc-toolset-14` and `scl enable gcc-toolset-14 bash`), or set CXX to one"
)
_CROSS_HINT = (
    "install g++ 11 or newer for {platform} (Debian, Ubuntu: `apt-get install g++-{gnu}`), or build these "
    "variants on a machine that is {platform}"
)


def find(probes: ProbeCache, platform: str) -> HostCompiler:
    """Return the compiler for a platform.

    It is CXX, or else g++, for this machine's platform, and has GNU's name of the cross compiler for another one, such
    as aarch64-linux-gnu-g++.
    """
    if platform == this_platform():
        program, hint = os.environ.get("CXX") or "g++", _HINT
    else:
        program = f"{platform}-gnu-g++"
        hint = _CROSS_HINT.format(platform=platform, gnu=f"{platform}-gnu".replace("_", "-"))
    executable = find_program(program)
    if executable is None:
        raise ToolchainError(
            f"no such program; expected the C++ compiler g++ {OLDEST} or newer for {platform}", where=program, hint=hint
        )
    path = Path(executable)
    # A g++ without its own assembler and linker takes those on the PATH.
    about = probes.recall(f"g++, target and headers {os.environ.get('PATH')}", [path], lambda: _inspect(path))
    if not about["gcc"]:
        raise ToolchainError(
            f"is not g++, which nvcc and the checks of binaries need; it reports: {about['banner']}",
            where=str(path),
            hint=hint,
        )
    version = about["version"]
    if int(version.split(".")[0]) < OLDEST:
        raise ToolchainError(f"is g++ {version}, expected {OLDEST} or newer", where=str(path), hint=hint)
    if about["machine"] != platform.partition("-")[0]:
        raise ToolchainError(f"compiles for {about['machine']}, expected {platform}", where=str(path), hint=hint)
    programs = [Path(program) for program in about["programs"]]
    try:
        identity = probes.recall("host identity", [path, *programs], lambda: _identify(about["banner"], programs))
    except OSError as error:
        raise ToolchainError(
            f"g++ runs this program, which cannot be read: {error.strerror}",
            where=str(error.filename),
            hint="reinstall g++ and binutils",
        ) from error
    search, install = about["search"], about["install"]
    of_cxx = [directory for directory in search if _is_of_cxx(directory, version)]
    return HostCompiler(
        path=path,
        platform=platform,
        version=version,
        identity=identity,
        headers=_readable(search, install, version),
        install=Path(install),
        cxx_include=tuple(of_cxx),
        c_include=tuple(name for name in search if name not in of_cxx and not _is_inside(name, install)),
    )


def _inspect(path: Path) -> dict[str, Any]:
    # The first word is the name that the program was called by.
    banner = output_of(path, "--version", hint=_HINT).partition("\n")[0].partition(" ")[2]
    version = output_of(path, "-dumpfullversion", hint=_HINT)
    # Clang and Intel's compilers accept GCC's options too.
    macros = output_of(path, "-dM", "-E", "-x", "c++", os.devnull, hint=_HINT)
    gcc = not re.search(r"^#define __(clang|INTEL_COMPILER|NVCOMPILER)__? ", macros, re.MULTILINE)
    if not gcc or not re.fullmatch(r"\d+(\.\d+)*", version):
        return {"gcc": False, "banner": banner or "nothing"}
    programs = [output_of(path, f"-print-prog-name={name}", hint=_HINT) for name in ("cc1plus", "as", "ld")]
    verbose = ("-E", "-v", "-x", "c++", os.devnull, "-o", os.devnull)
    search = output_of(path, *verbose, hint=_HINT, stderr=True, environment=environment())
    target = output_of(path, "-dumpmachine", hint=_HINT)
    searched = re.search(r"^#include <\.\.\.> .*\n((?: .*\n)*)", search, re.MULTILINE)
    return {
        "gcc": True,
        "banner": f"{banner} {target}",
        "machine": target.partition("-")[0],
        "version": version,
        "programs": [find_program(program) or program for program in programs],
        "search": [line.strip() for line in searched[1].splitlines()] if searched else [],
        "install": str(Path(output_of(path, "-print-file-name=include", hint=_HINT)).parent),
    }


def _identify(banner: str, programs: list[Path]) -> str:
    digest = hashlib.sha256(banner.encode())
    for program in programs:
        digest.update(hashlib.sha256(program.read_bytes()).digest())
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """Return an environment for compilers, without this process's variables that may change their output."""
    kept = {name: value for name, value in os.environ.items() if re.fullmatch("|".join(_KEPT), name)}
    kept.update(LC_ALL="C.UTF-8", TZ="UTC", SOURCE_DATE_EPOCH="0")
    # Nix's linker wrapper adds a run path otherwise. It reads the first name in a Nix shell, the second elsewhere.
    for name in ("NIX_DONT_SET_RPATH", f"NIX_DONT_SET_RPATH_{_platform.machine()}_unknown_linux_gnu"):
        kept[name] = "1"
    return kept


def _is_of_cxx(directory: str, version: str) -> bool:
    """Return whether a directory that g++ searches is one of its C++ library, by the version in its path."""
    return re.search(rf"/c\+\+/{version.partition('.')[0]}\b", directory) is not None


def _is_inside(directory: str, install: str) -> bool:
    """Return whether a directory is inside the one of g++'s own headers and start files."""
    installed = (os.path.normpath(install), os.path.realpath(install))
    names = (os.path.normpath(directory), os.path.realpath(directory))
    return any(f"{name}/".startswith(f"{own}/") for name in names for own in installed)


def _readable(search: Sequence[str], install: str, version: str) -> tuple[str, ...]:
    """Return regular expressions for the paths of the headers that belong to g++ and the C library."""
    whole: list[str] = []
    by_name: list[str] = []
    for directory in dict.fromkeys(
        name for path in search for name in (os.path.normpath(path), os.path.realpath(path))
    ):
        if _is_of_cxx(directory, version) or _is_inside(directory, install):
            whole.append(f"{re.escape(directory)}/.*")
        elif not directory.endswith("/local/include"):
            by_name += _of_c_library(directory)
    return tuple(dict.fromkeys([*whole, *by_name]))


def _of_c_library(directory: str) -> Iterator[str]:
    table = toml_file.read(Path(__file__).with_name("glibc_headers.toml"))
    top, directories = re.escape(directory), table["directories"]
    for below, names in table["files"].items():
        yield rf"{top}/{below}({'|'.join(map(re.escape, names.split()))})\.h"
    yield f"{top}/({'|'.join((*directories['glibc'], *directories['kernel']))})/.*"
    # The kernel's headers may be behind links: the directory with Nix, each file of `asm` since Debian 13.
    for name in directories["kernel"]:
        kernel = Path(directory, name)
        links = [path for path in kernel.iterdir() if path.is_symlink()] if kernel.is_dir() else []
        for real in {kernel.resolve(), *(link.resolve().parent for link in links)} - {kernel}:
            yield f"{re.escape(str(real))}/.*"
