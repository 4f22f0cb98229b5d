"""Check that every undefined symbol of a binary will be found when it is loaded.

A symbol with a version comes from a library that the linker saw. One without a version must come from the interpreter,
or from a needed library that is known to define such names. `torch_libraries.toml` lists the CUDA libraries,
`cuda_runtimes.toml` the functions of each CUDA runtime.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.checks import cuda_runtimes
from kernel_builder.checks.findings import CheckedPackage, Finding
from kernel_builder.checks.torch_stable_abi import TORCH_C, TORCH_CPP, shims
from kernel_builder.config.variant import FullAbi, Noarch, Release, StableAbi
from kernel_builder.demangle import demangle
from kernel_builder.elf import SharedObject
from kernel_builder.plural import some_of

NAME = "undefined"
_NAMED = 6  # so many undefined symbols are named

_PYTHON = re.compile(r"_?Py[A-Z_]")
_CPP_RUNTIME = re.compile(r"_Z(?:T[ISV])?(?:N[KVrRO]*)?S[tabsiod]|__cxa_")
_TORCH_LIBRARIES = re.compile(r"lib(?:torch|torch_cpu|torch_cuda|torch_python|c10)\.so")
_TORCH_CUDA = re.compile(r"_Z(?:T[ISV])?N[KVrRO]*(?:2at|3c10)4cuda")


@dataclass(frozen=True)
class _Family:
    """Symbols that match `names` and are defined by libraries (`DT_NEEDED` entries) that match `libraries`."""

    what: str
    names: re.Pattern[str]
    libraries: re.Pattern[str]
    cuda: bool
    hint: str


def _family(what: str, names: str, libraries: str, hint: str, *, cuda: bool = True) -> _Family:
    return _Family(what, re.compile(names), re.compile(libraries), cuda, hint)


_HINTS = {"cuda": "get the function with cudaGetDriverEntryPoint, or "}
_LINK_TORCH = "link with libtorch_cpu.so"
_LINK_TORCH_CUDA = "link with libtorch_cuda.so, which loads the CUDA libraries that Torch uses"
_FAMILIES = (
    _family(
        "the OpenMP runtime",
        r"(?:GOMP|omp)_",
        r"libtorch_cpu\.so|libgomp\.so",
        f"{_LINK_TORCH}, which loads the one OpenMP runtime of the process",
        cuda=False,
    ),
    _family("SLEEF, which Torch contains", r"Sleef_[a-z]", r"libtorch_cpu\.so", _LINK_TORCH, cuda=False),
)


def check_undefined(package: CheckedPackage) -> Iterator[Finding]:
    for binary in package.binaries:
        unexplained = [symbol.name for symbol in binary.undefined if symbol.version is None and not symbol.weak]
        readable = demangle(unexplained)
        unknown = [readable[name] for name in unexplained if not _is_known(package, binary, name)]
        if unknown:
            yield _undefined(binary, unknown)
        for name in unexplained:
            yield from _symbol(package, binary, name, readable[name])


def _undefined(binary: SharedObject, names: Sequence[str]) -> Finding:
    """Return one finding for all symbols that nothing defines: a source that is left out has many."""
    be, them, calls = ("is", "it", "call") if len(names) == 1 else ("are", "them", "calls")
    return Finding(
        NAME,
        binary.name,
        f"{some_of(names, _NAMED)} {be} undefined: no source of the kernel and no library defines {them}",
        f"add the source that defines {them} to `src` of [torch] or of a [kernel.*] table, or drop the {calls}",
    )


def _family_of(package: CheckedPackage, name: str) -> _Family | None:
    families = _FAMILIES + _cuda_families(package.variant.framework if package.variant else None) + _torch_families()
    return next((family for family in families if family.names.match(name)), None)


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
    family = _family_of(package, name)
    if family is None:
        return  # `_undefined` reports it
    if family.cuda and not package.may_use_cuda:
        backend = package.variant.backend if package.variant else "this"
        yield Finding(
            NAME,
            binary.name,
            f"{readable} is a symbol of {family.what}, which a {backend} variant does not have",
            'keep CUDA code in a [kernel.*] table with backend = "cuda", or under #ifdef CUDA_KERNEL',
        )
    elif not any(family.libraries.match(library) for library in binary.needed):
        yield Finding(
            NAME,
            binary.name,
            f"{readable} is a symbol of {family.what}, and no library that the binary needs defines it",
            family.hint,
        )
    else:
        yield from _lacking(package, binary, name)


def _lacking(package: CheckedPackage, binary: SharedObject, name: str) -> Iterator[Finding]:
    """Yield a finding if a CUDA runtime that the variant is loaded with does not have a function."""
    cuda = package.variant.cuda if package.variant else None
    lacking = cuda_runtimes.lacking(name, cuda_runtimes.loading(cuda)) if cuda else ()
    if lacking:
        yield Finding(
            NAME,
            binary.name,
            f"{name} is not in the runtime of CUDA {' and '.join(map(str, lacking))}, which loads this variant too",
            "call a function that every release has, or get this one with cudaGetDriverEntryPoint or dlsym",
        )


@cache
def _torch_families() -> tuple[_Family, ...]:
    cuda = "|".join(sorted(shims().cuda))
    return (
        _family(
            "Torch's CUDA part", rf"{_TORCH_CUDA.pattern}|(?:{cuda})$", r"lib(?:torch|c10)_cuda\.so", _LINK_TORCH_CUDA
        ),
        _family(
            "Torch",
            rf"{TORCH_CPP.pattern}|{TORCH_C.pattern}",
            _TORCH_LIBRARIES.pattern,
            _LINK_TORCH,
            cuda=False,
        ),
    )


@cache
def _cuda_families(framework: FullAbi | StableAbi | Noarch | None) -> tuple[_Family, ...]:
    """Return the CUDA libraries that `torch_libraries.toml` lists, as a package for `framework` finds them."""
    data = toml_file.read(Path(__file__).with_name("torch_libraries.toml"))
    prefixes = {stem: entry.get("symbols", stem) for stem, entry in data.items()}
    families = []
    # The longest first: the prefix of the driver begins the names of other libraries.
    for stem in sorted(data, key=lambda stem: len(prefixes[stem]), reverse=True):
        own = rf"lib{stem}\.so"
        loaded = _is_loaded(data[stem], framework)
        families.append(
            _family(
                data[stem].get("title", f"lib{stem}"),
                rf"(?:__)?{prefixes[stem]}[A-Z]",
                rf"libtorch_cuda\.so|{own}" if loaded else own,
                _LINK_TORCH_CUDA
                if loaded
                else f"{_HINTS.get(stem, '')}open lib{stem}.so with dlopen when it is called",
            )
        )
    return tuple(families)


def _is_loaded(entry: Mapping[str, Any], framework: FullAbi | StableAbi | Noarch | None) -> bool:
    """Return whether libtorch_cuda.so loads a library in every Torch release that a binary has to load in."""
    if not entry.get("loaded", True):
        return False
    if framework is None or isinstance(framework, Noarch):
        return True
    if "since" in entry and framework.release < Release.parse(entry["since"]):
        return False
    return "until" not in entry or (
        isinstance(framework, FullAbi) and framework.release <= Release.parse(entry["until"])
    )
