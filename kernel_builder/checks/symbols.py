"""Checks of a binary's undefined symbols.

A symbol with a version comes from a library that the linker saw. One without a version must come from the interpreter,
or from a needed library that is known to define such names: each back end lists those of its device, and
`torch_shims.toml` the C functions of Torch's stable ABI with the release that introduced each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from kernel_builder import backends, toml_file
from kernel_builder.backends import CompiledBackend, SymbolFamily
from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable
from kernel_builder.config.variant import Abi, Release, StableAbi
from kernel_builder.demangle import demangle
from kernel_builder.elf import SharedObject, Symbol
from kernel_builder.plural import some_of

_NAMED = 6  # so many undefined symbols are named

# A mangled name (function, variable, vtable, type info, guard) in a namespace of Torch.
_TORCH_CPP = re.compile(r"_Z(?:T[CISTVW]|GV)?N[KVrRO]*(?:2at|3c10|4c10d|5torch|6caffe2)")
# Torch's C functions and its Python bindings, stable or not.
_TORCH_C = re.compile(r"(?:aoti_)?torch_[a-z]|aoti_record_|_?THP")
_PYTHON = re.compile(r"_?Py[A-Z_]")
_CPP_RUNTIME = re.compile(r"_Z(?:T[ISV])?(?:N[KVrRO]*)?S[tabsiod]|__cxa_")
_TORCH_LIBRARIES = re.compile(r"lib(?:torch|torch_cpu|torch_cuda|torch_python|c10)\.so")
_LINK_TORCH = "link with libtorch_cpu.so"
_FAMILIES = tuple(
    SymbolFamily(of["title"], re.compile(of["names"]), re.compile(of["libraries"]), of["hint"])
    for of in toml_file.read(Path(__file__).with_name("symbol_families.toml"))["family"]
)
_TORCH = SymbolFamily("Torch", re.compile(rf"{_TORCH_CPP.pattern}|{_TORCH_C.pattern}"), _TORCH_LIBRARIES, _LINK_TORCH)


# The C functions of the stable ABI: the release that introduced each, and by back end those of one only.
_SHIMS = toml_file.read(Path(__file__).with_name("torch_shims.toml"))
SHIMS_SINCE = {name: Release.parse(release) for release, names in _SHIMS["release"].items() for name in names}
SHIMS_OF_BACKEND: Mapping[str, list[str]] = _SHIMS["library"]


def check_torch_stable_abi(package: CheckedPackage, binary: SharedObject) -> Iterator[Finding]:
    """Check that a binary which claims Torch's stable ABI uses nothing of Torch but that ABI's C functions.

    Header-only C++ code of Torch may be compiled into a binary, but no C++ symbol of Torch may be left undefined.
    """
    if package.variant is None or not isinstance(package.variant.framework, StableAbi):
        raise NotApplicable("the variant does not claim the stable ABI")
    claimed = package.variant.framework.release
    oldest, newest = min(SHIMS_SINCE.values()), max(SHIMS_SINCE.values())
    if claimed < oldest:
        raise NotApplicable(f"nothing is known about the stable ABI of Torch {claimed}; the data starts at {oldest}")
    foreign = []
    for name in (symbol.name for symbol in binary.undefined):
        release = SHIMS_SINCE.get(name)
        if release is None:
            if _TORCH_CPP.match(name) or (_TORCH_C.match(name) and claimed <= newest):
                foreign.append(name)
        elif release > claimed:
            yield Finding(
                f"uses {name}, which is new in Torch {release}; the binary must load in {claimed}",
                f'set `stable-abi = "{release}"` in build.toml, or use it only where '
                f"TORCH_FEATURE_VERSION >= TORCH_VERSION_{release.major}_{release.minor}_0",
            )
    for readable in demangle(foreign).values():
        if "torch::stable::" in readable.partition("(")[0]:
            yield Finding(
                f"{readable} is undefined: its source includes a header that only declares it",
                "include the header of torch/csrc/stable that defines it, for tensors torch/csrc/stable/tensor.h",
            )
            continue
        yield Finding(
            f"uses {readable}, which is not part of Torch's stable ABI",
            "include only headers of torch/csrc/stable and torch/headeronly, "
            "or remove the backend from `stable-abi` in build.toml",
        )


def check_undefined(package: CheckedPackage, binary: SharedObject) -> Iterator[Finding]:
    """Check that every undefined symbol of a binary will be found when it is loaded."""
    names = [symbol.name for symbol in binary.undefined if symbol.version is None and not symbol.weak]
    readable = demangle(names)
    needs_torch = any(map(_TORCH_LIBRARIES.match, binary.needed))
    unknown = []
    for name in (name for name in names if not _PYTHON.match(name)):
        if needs_torch and _CPP_RUNTIME.match(name):
            yield Finding(
                f"{readable[name]} is a symbol of the C++ runtime, but would be taken from a Torch library that also "
                "defines it",
                "link the C++ runtime before Torch's libraries",
                "warning",
            )
        elif known := _family_of(package, name):
            yield from _of_family(package, binary, name, readable[name], *known)
        else:
            unknown.append(readable[name])
    if unknown:  # one finding: a source that is left out has many
        be, them, calls = ("is", "it", "call") if len(unknown) == 1 else ("are", "them", "calls")
        table = "tvm-ffi" if package.is_on_tvm_ffi else "torch"
        yield Finding(
            f"{some_of(unknown, _NAMED)} {be} undefined: no source of the kernel and no library defines {them}",
            f"add the source that defines {them} to `src` of [{table}] or of a [kernel.*] table, or drop the {calls}",
        )


def _of_family(
    package: CheckedPackage,
    binary: SharedObject,
    name: str,
    readable: str,
    family: SymbolFamily,
    backend: CompiledBackend | None,
) -> Iterator[Finding]:
    """Yield at most one finding about a symbol of a known library."""
    variant = package.variant
    if backend and variant and backend is not variant.backend:
        yield Finding(
            f"{readable} is a symbol of {family.title}, which a {variant.backend} variant does not have",
            f'keep {backend.title} code in a [kernel.*] table with language = "cpp-{backend}", or under '
            f"#ifdef {backend.name.upper()}_KERNEL",
        )
    elif not any(family.libraries.match(library) for library in binary.needed):
        yield Finding(
            f"{readable} is a symbol of {family.title}, and no library that the binary needs defines it", family.hint
        )
    elif variant and variant.release:
        for own in package.backends:
            if lacking := own.lacking(name, variant.release):
                hint = "call a function that every release has, or get this one with cudaGetDriverEntryPoint or dlsym"
                yield Finding(f"{name} {lacking}", hint)


def library_of(package: CheckedPackage, symbol: Symbol) -> str:
    """Return the title of the library that defines an undefined symbol, or `unknown`."""
    if symbol.version is not None:
        return "the C library" if symbol.version.startswith("GLIBC_") else "the C++ runtime"
    if _PYTHON.match(symbol.name):
        return "Python"
    known = _family_of(package, symbol.name)
    return known[0].title if known else "the C++ runtime" if _CPP_RUNTIME.match(symbol.name) else "unknown"


def _family_of(package: CheckedPackage, name: str) -> tuple[SymbolFamily, CompiledBackend | None] | None:
    """Return the library that a symbol is of, and the back end whose variants alone may have it; None for all."""
    framework = package.variant.framework if package.variant else None
    # The package's back ends first: back ends share some names.
    ordered = sorted(backends.every(), key=lambda backend: backend not in package.backends)
    families: list[tuple[SymbolFamily, CompiledBackend | None]] = [(family, None) for family in _FAMILIES]
    families += [(family, backend) for backend in ordered for family in _families_of(backend, framework)]
    return next((pair for pair in (*families, (_TORCH, None)) if pair[0].names.match(name)), None)


@cache
def _families_of(backend: CompiledBackend, framework: Abi | None) -> tuple[SymbolFamily, ...]:
    """Return the libraries of a device, and Torch's own part for it."""
    families = tuple(backend.symbol_families(framework))
    if backend.torch_part is None:
        return families
    shim_names = "|".join(sorted(SHIMS_OF_BACKEND.get(backend.shims_of or backend.name, ())))
    names = re.compile(rf"{backend.torch_part.names.pattern}|(?:{shim_names})$")
    return (*families, replace(backend.torch_part, names=names))
