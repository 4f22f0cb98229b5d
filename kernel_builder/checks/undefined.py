"""Check that every undefined symbol of a binary will be found when it is loaded.

A symbol with a version comes from a library that the linker saw. One without a version must come from the interpreter,
or from a needed library that is known to define such names: each back end lists those of its device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from kernel_builder.backends import CompiledBackend, SymbolFamily
from kernel_builder.checks.findings import CheckedPackage, Finding
from kernel_builder.checks.torch_stable_abi import TORCH_C, TORCH_CPP, shims
from kernel_builder.config.variant import Abi
from kernel_builder.demangle import demangle
from kernel_builder.elf import SharedObject, Symbol
from kernel_builder.plural import some_of

NAME = "undefined"
_NAMED = 6  # so many undefined symbols are named

_PYTHON = re.compile(r"_?Py[A-Z_]")
_CPP_RUNTIME = re.compile(r"_Z(?:T[ISV])?(?:N[KVrRO]*)?S[tabsiod]|__cxa_")
_TORCH_LIBRARIES = re.compile(r"lib(?:torch|torch_cpu|torch_cuda|torch_python|c10)\.so")
_LINK_TORCH = "link with libtorch_cpu.so"
_FAMILIES = (
    SymbolFamily(
        "the OpenMP runtime",
        re.compile(r"(?:GOMP|omp)_"),
        re.compile(r"libtorch_cpu\.so|libgomp\.so"),
        f"{_LINK_TORCH}, which loads the one OpenMP runtime of the process",
    ),
    SymbolFamily(
        "SLEEF, which Torch contains", re.compile(r"Sleef_[a-z]"), re.compile(r"libtorch_cpu\.so"), _LINK_TORCH
    ),
)
_TVM_FFI = SymbolFamily(
    "TVM FFI",
    re.compile(r"TVMFFI[A-Z]|_Z(?:T[ISV])?N[KVrRO]*3tvm3ffi"),
    re.compile(r"libtvm_ffi\.so"),
    "make it a [tvm-ffi] project, which links libtvm_ffi.so",
)
_TORCH = SymbolFamily("Torch", re.compile(rf"{TORCH_CPP.pattern}|{TORCH_C.pattern}"), _TORCH_LIBRARIES, _LINK_TORCH)


def check_undefined(package: CheckedPackage) -> Iterator[Finding]:
    for binary in package.binaries:
        unexplained = [symbol.name for symbol in binary.undefined if symbol.version is None and not symbol.weak]
        readable = demangle(unexplained)
        unknown = [readable[name] for name in unexplained if not _is_known(package, binary, name)]
        if unknown:
            yield _undefined(binary, unknown, "tvm-ffi" if package.is_on_tvm_ffi else "torch")
        for name in unexplained:
            yield from _symbol(package, binary, name, readable[name])


def _undefined(binary: SharedObject, names: Sequence[str], table: str) -> Finding:
    """Return one finding for all symbols that nothing defines: a source that is left out has many."""
    be, them, calls = ("is", "it", "call") if len(names) == 1 else ("are", "them", "calls")
    return Finding(
        NAME,
        binary.name,
        f"{some_of(names, _NAMED)} {be} undefined: no source of the kernel and no library defines {them}",
        f"add the source that defines {them} to `src` of [{table}] or of a [kernel.*] table, or drop the {calls}",
    )


def _family_of(package: CheckedPackage, name: str) -> tuple[SymbolFamily, CompiledBackend | None] | None:
    """Return the library that a symbol is of, and the back end whose variants alone may have it; None for all."""
    framework = package.variant.framework if package.variant else None
    # Those of the package first: back ends share some names.
    known = sorted(package.known_backends, key=lambda backend: backend not in package.backends)
    families: list[tuple[SymbolFamily, CompiledBackend | None]] = [(family, None) for family in (*_FAMILIES, _TVM_FFI)]
    families += [(family, backend) for backend in known for family in _of_backend(backend, framework)]
    return next((pair for pair in (*families, (_TORCH, None)) if pair[0].names.match(name)), None)


def library_of(package: CheckedPackage, symbol: Symbol) -> str:
    """Return the title of the library that defines an undefined symbol, or `unknown`."""
    if symbol.version is not None:
        return "the C library" if symbol.version.startswith("GLIBC_") else "the C++ runtime"
    if _PYTHON.match(symbol.name):
        return "Python"
    found = _family_of(package, symbol.name)
    return found[0].title if found else "the C++ runtime" if _CPP_RUNTIME.match(symbol.name) else "unknown"


def _is_known(package: CheckedPackage, binary: SharedObject, name: str) -> bool:
    """Return whether a symbol is the interpreter's, the C++ runtime's, or of a known library."""
    if _PYTHON.match(name) or _family_of(package, name):
        return True
    return any(map(_TORCH_LIBRARIES.match, binary.needed)) and _CPP_RUNTIME.match(name) is not None


def _symbol(package: CheckedPackage, binary: SharedObject, name: str, readable: str) -> Iterator[Finding]:
    """Yield at most one finding, about the undefined symbol `name`."""
    if _PYTHON.match(name):
        return
    needs_torch = any(_TORCH_LIBRARIES.match(library) for library in binary.needed)
    if needs_torch and _CPP_RUNTIME.match(name):
        yield Finding(
            NAME,
            binary.name,
            f"{readable} is a symbol of the C++ runtime, but would be taken from a Torch library that also defines it",
            "link the C++ runtime before Torch's libraries",
            "warning",
        )
        return
    found = _family_of(package, name)
    if found is None:
        return  # `_undefined` reports it
    family, backend = found
    variant = package.variant
    if backend and variant and backend is not variant.backend:
        yield Finding(
            NAME,
            binary.name,
            f"{readable} is a symbol of {family.title}, which a {variant.backend} variant does not have",
            f'keep {backend.title} code in a [kernel.*] table with language = "cpp-{backend}", or under '
            f"#ifdef {backend.name.upper()}_KERNEL",
        )
    elif not any(family.libraries.match(library) for library in binary.needed):
        yield Finding(
            NAME,
            binary.name,
            f"{readable} is a symbol of {family.title}, and no library that the binary needs defines it",
            family.hint,
        )
    else:
        yield from _lacking(package, binary, name)


def _lacking(package: CheckedPackage, binary: SharedObject, name: str) -> Iterator[Finding]:
    """Yield a finding if a client that loads the variant does not have a function."""
    release = package.variant.release if package.variant else None
    for backend in package.backends:
        if release and (lacking := backend.lacking(name, release)):
            yield Finding(
                NAME,
                binary.name,
                f"{name} {lacking}",
                "call a function that every release has, or get this one with cudaGetDriverEntryPoint or dlsym",
            )


@cache
def _of_backend(backend: CompiledBackend, framework: Abi | None) -> tuple[SymbolFamily, ...]:
    """Return the libraries of a device, and Torch's own part for it."""
    families = tuple(backend.symbol_families(framework))
    if backend.torch_part is None:
        return families
    shim_names = "|".join(sorted(shims().of_backend.get(backend.shims_of or backend.name, ())))
    names = re.compile(rf"{backend.torch_part.names.pattern}|(?:{shim_names})$")
    return (*families, replace(backend.torch_part, names=names))
