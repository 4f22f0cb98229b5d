"""Builds the stub libraries that binaries are linked against, so that binaries of new machines run on old ones.

The linker records the version of every symbol that it finds in a shared library. So that it never records a version
newer than glibc 2.28, it gets stubs of this machine's C and C++ runtime libraries, without the newer symbol
versions: `exp` becomes `exp@GLIBC_2.2.5`.

Symbols that exist only in newer versions come from `libcompat.a`, as far as it has them. It is the compiler's own
static libstdc++ without the symbols that the oldest supported libstdc++ has. The headers of each g++ thus find their
symbols, and symbols with state that the process must share, such as the locale and the standard streams, stays in the
shared library. `templates/compat.cpp` adds a few functions of the C library. Other symbols stay undefined, and the
build reports them by name.

Torch is not needed to link: a shared object only records the names of its libraries, and an empty library with the
right soname suffices. The OpenMP runtime is not linked: its symbols stay undefined, without a version, and resolve to
the libgomp that libtorch_cpu.so needs, so that a process has one. Those that Torch's libgomp lacks are reported too.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.backends.tools import HostCompiler
from kernel_builder.elf import DefinedSymbol, defined_symbols, without_definitions
from kernel_builder.probe_cache import output_of
from kernel_builder.toolchain import host_compiler
from kernel_format.errors import ToolchainError

# Increase when `make` changes, so that the sysroot of an older builder is not used.
RECIPE = 5
# `runtime`, `unversioned`, `ceilings`, `compat`: described in the file.
_TABLE: Mapping[str, Any] = toml_file.read(Path(__file__).with_suffix(".toml"))
UNVERSIONED_LIBRARIES: tuple[str, ...] = tuple(_TABLE["unversioned"]["libraries"])

OPENMP_LIBRARY = "libgomp.so.1"

# Static members of locale facets: a locale finds the facet of the same library only.
_FACET_ID = re.compile(r"_Z(?:GV)?NK?St.*2idE")

COMPAT = "lib/libcompat.a"
_HINT = (
    "reinstall g++ with its runtime libraries (Debian: apt-get install --reinstall g++; Fedora, RHEL: dnf "
    "install gcc-c++ libstdc++-static)"
)


@dataclass(frozen=True)
class Sysroot:
    """A directory of libraries to link against: `lib/` (the stubs) and `too-new.json`."""

    root: Path
    platform: str

    @property
    def runtime_arguments(self) -> list[str]:
        """The arguments that replace the compiler's default libraries at the end of a link command."""
        dynamic = [f"-l:{name}" for name in _runtime_libraries(self.platform)]
        return ["-l:libcompat.a", "-Wl,--as-needed", *dynamic, "-lgcc", "-Wl,--no-as-needed"]

    def too_new(self) -> Mapping[str, str]:
        """Return symbol -> its oldest version, for symbols that this machine has only above the ceiling."""
        loaded: dict[str, str] = json.loads((self.root / "too-new.json").read_text())
        return loaded


def _runtime_libraries(platform: str) -> list[str]:
    return [*_TABLE["runtime"]["every"], *_TABLE["runtime"][platform]]


def _version_key(version: str) -> tuple[str, tuple[int, ...]]:
    """Return family and numbers of a symbol version such as `GLIBC_2.17`; no family for a private version."""
    match = re.fullmatch(r"([A-Z]+)_(\d+(?:\.\d+)*)", version)
    return (match[1], tuple(map(int, match[2].split(".")))) if match else ("", ())


def _split_by_ceiling(symbols: Iterable[DefinedSymbol]) -> tuple[list[DefinedSymbol], dict[str, str]]:
    """Keep the versions of each name at or below the ceiling; name the others with their oldest version.

    Returns:
        The kept symbols by name, of each name the newest version last, and `name -> version` of those that exist only
        above the ceiling.
    """
    kept: dict[str, list[DefinedSymbol]] = {}
    late: dict[str, str] = {}
    for symbol in sorted(symbols, key=lambda symbol: _version_key(symbol.version)):
        family, numbers = _version_key(symbol.version)
        if numbers and numbers <= tuple(_TABLE["ceilings"].get(family, ())):
            kept.setdefault(symbol.name, []).append(symbol)
        elif family:
            late.setdefault(symbol.name, symbol.version)
    in_order = [symbol for name in sorted(kept) for symbol in kept[name]]
    return in_order, {n: v for n, v in late.items() if n not in kept}


def _stub_source(symbols: Sequence[DefinedSymbol]) -> tuple[str, str]:
    """Return assembly that defines `symbols`, and its version script.

    Of a name with several versions, a binary that names none gets the last; `.symver` in a source can name another.
    """
    lines = [".text"]
    versions = set()
    default = {symbol.name: symbol for symbol in symbols}
    for number, symbol in enumerate(symbols):
        local = f"s{number}"
        section = {"function": ".text", "object": ".data", "tls_object": '.section .tdata,"awT",@progbits'}[symbol.kind]
        lines += [
            section,
            f".globl {local}",
            f".type {local}, @{symbol.kind}",
            f".size {local}, {max(symbol.size, 1)}",
            f"{local}:",
            f".zero {min(max(symbol.size, 1), 16) if symbol.kind != 'function' else 1}",
            f'.symver {local}, "{symbol.name}{"@@@" if default[symbol.name] is symbol else "@"}{symbol.version}"',
        ]
        versions.add(symbol.version)
    lines.append('.section .note.GNU-stack,"",@progbits')
    script = "".join(f"{version} {{ }};\n" for version in sorted(versions, key=_version_key))
    return "\n".join(lines) + "\n", script


def _run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env=host_compiler.environment()
    )
    if done.returncode:
        raise ToolchainError(
            f"the C++ compiler failed to make a library to link against: {done.stderr.strip()}",
            where=" ".join(command),
            hint="`kernel-builder doctor` checks the host compiler",
        )
    return done.stdout


def _find(cxx: Path, name: str) -> Path | None:
    """Return the path of a runtime library or object that the compiler links, or None if it has none."""
    path = Path(output_of(cxx, f"-print-file-name={name}", hint=_HINT))
    return path.resolve() if path.is_absolute() else None


def _locate(cxx: Path, name: str) -> Path:
    """Return the path of a runtime library or object that the compiler links."""
    if path := _find(cxx, name):
        return path
    raise ToolchainError(f"the C++ compiler does not find {name}", where=str(cxx), hint=_HINT)


def make(host: HostCompiler, directory: Path, libraries: Iterable[str] = ()) -> None:
    """Make the stub libraries of one host compiler in an empty directory, and empty ones of the names `libraries`."""
    cxx, lib = host.path, directory / "lib"
    lib.mkdir(parents=True)
    late: dict[str, str] = {}
    present: set[str] = set()
    for soname in _runtime_libraries(host.platform):
        kept, too_new = _split_by_ceiling(defined_symbols(_locate(cxx, soname)))
        present.update(symbol.name for symbol in kept)
        late.update(too_new)
        _link_stub(cxx, directory, soname, kept)
    for soname in (*UNVERSIONED_LIBRARIES, *libraries):
        _link_stub(cxx, directory, soname, [])
    for name in ("stub.s", "stub.map", "stub.o"):
        (directory / name).unlink()
    openmp = _find(cxx, OPENMP_LIBRARY)
    if openmp is not None:
        too_new = _split_by_ceiling(defined_symbols(openmp))[1]
        late.update({name: version for name, version in too_new.items() if version.startswith(("GOMP_", "OMP_"))})

    provided = _make_compat(cxx, directory, present | {name for name in late if _FACET_ID.fullmatch(name)})
    remaining = {name: version for name, version in sorted(late.items()) if name not in present | provided}
    (directory / "too-new.json").write_text(json.dumps(remaining, indent=0) + "\n")


def _make_compat(cxx: Path, directory: Path, dropped: set[str]) -> set[str]:
    """Make `libcompat.a`, which does not define the symbols in `dropped`, and return its symbols."""
    source = Path(__file__).parents[1] / "templates" / "compat.cpp"
    (directory / "compat.cpp").write_text(source.read_text())
    members = []
    for member in _TABLE["compat"]["members"]:
        flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", f"-D{member}"]
        _run([str(cxx), *flags, "-c", "compat.cpp", "-o", f"{member}.o"], directory)
        members.append(f"{member}.o")
    own = _defined(cxx, directory, *members)
    # The compilers of RHEL use the system's libstdc++.so.6 and have newer symbols in a library of their own.
    archive = _find(cxx, "libstdc++_nonshared.a") or _locate(cxx, "libstdc++.a")
    (directory / COMPAT).write_bytes(without_definitions(archive.read_bytes(), dropped | own))
    _run([output_of(cxx, "-print-prog-name=ar", hint=_HINT), "rcD", COMPAT, *members], directory)
    for name in [*members, "compat.cpp"]:
        (directory / name).unlink()
    return _defined(cxx, directory, COMPAT)


def _defined(cxx: Path, directory: Path, *files: str) -> set[str]:
    """Return the names of the global symbols that objects or static libraries define."""
    lines = _run(
        [output_of(cxx, "-print-prog-name=nm", hint=_HINT), "--defined-only", "--extern-only", "-P", *files], directory
    ).splitlines()
    return {line.split()[0] for line in lines if len(line.split()) > 1}


def _link_stub(cxx: Path, directory: Path, soname: str, symbols: Sequence[DefinedSymbol]) -> None:
    assembly, script = _stub_source(symbols)
    (directory / "stub.s").write_text(assembly)
    (directory / "stub.map").write_text(script)
    _run([str(cxx), "-c", "stub.s", "-o", "stub.o"], directory)
    flags = ["-nostdlib", "-shared", "-Wl,--build-id=none", f"-Wl,-soname,{soname}"]
    versions = ["-Wl,--version-script=stub.map"] if script else []
    _run([str(cxx), *flags, *versions, "-o", f"lib/{soname}", "stub.o"], directory)
