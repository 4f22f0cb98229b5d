"""Finds the user's g++ for a platform, checks that it can be used, and identifies it by its content."""

from __future__ import annotations

import hashlib
import os
import platform as _platform
import re
import shutil
from pathlib import Path
from typing import Any

from kernel_builder.backends.tools import HostCompiler
from kernel_builder.config.variant import this_platform
from kernel_builder.probe_cache import ProbeCache, output_of
from kernel_builder.toolchain import own_headers
from kernel_format.errors import ToolchainError

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
    executable = shutil.which(program)
    if executable is None:
        raise ToolchainError(
            f"no such program; expected the C++ compiler g++ {OLDEST} or newer for {platform}",
            where=program,
            hint=hint,
        )
    path = Path(executable).absolute()
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
    return HostCompiler(
        path=path,
        platform=platform,
        version=version,
        identity=identity,
        headers=own_headers.patterns(search, install, version),
        install=Path(install),
        cxx_include=tuple(directory for directory in search if own_headers.is_of_cxx(directory, version)),
        c_include=tuple(
            directory
            for directory in search
            if not own_headers.is_of_cxx(directory, version) and not own_headers.is_inside(directory, install)
        ),
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
        "programs": [shutil.which(program) or program for program in programs],
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
