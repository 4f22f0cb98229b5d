"""Check that every undefined symbol of a binary will be found when it is loaded.

A symbol with a version comes from a library that the linker saw. One without a version must come from the interpreter,
or from a needed library that is known to define such names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from kernel_builder.checks.demangle import demangle
from kernel_builder.checks.findings import CheckedPackage, Finding
from kernel_builder.checks.torch_stable_abi import TORCH_C, TORCH_CPP, shims
from kernel_builder.elf import SharedObject

NAME = "undefined"

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


_LINK_TORCH_CUDA = "link with libtorch_cuda.so, which loads the CUDA libraries that Torch uses"
_FAMILIES = (
    _family("the CUDA runtime", r"(?:__)?cuda[A-Z]", r"libtorch_cuda\.so|libcudart\.so", _LINK_TORCH_CUDA),
    _family("cuBLAS", r"cublas(?:Lt)?[A-Z]", r"libtorch_cuda\.so|libcublas(?:Lt)?\.so", _LINK_TORCH_CUDA),
    _family(
        "a CUDA library that Torch uses",
        r"(?:cudnn|cufft|curand|cusolver|cusparse|nccl)[A-Z]",
        r"libtorch_cuda\.so|lib(?:cudnn|cufft|curand|cusolver|cusparse|nccl)\w*\.so",
        _LINK_TORCH_CUDA,
    ),
    _family("NVRTC", r"nvrtc[A-Z]", r"libnvrtc\.so", "link with libnvrtc, or open it with dlopen when it is called"),
    _family(
        "the CUDA driver",
        r"cu[A-Z]",
        r"libcuda\.so",
        "get the function with cudaGetDriverEntryPoint, so that the kernel loads without a driver",
    ),
)


def check_undefined(package: CheckedPackage) -> Iterator[Finding]:
    for binary in package.binaries:
        unexplained = [symbol.name for symbol in binary.undefined if symbol.version is None and not symbol.weak]
        readable = demangle(unexplained)
        for name in unexplained:
            yield from _symbol(package, binary, name, readable[name])


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
    family = next((family for family in _FAMILIES + _torch_families() if family.names.match(name)), None)
    if family is None:
        yield Finding(
            NAME,
            binary.name,
            f"{readable} is undefined: no source of the kernel and no library defines it",
            "add the source that defines it to `src` of [torch] or of a [kernel.*] table, or drop the call",
        )
    elif family.cuda and not package.may_use_cuda:
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
            "link with libtorch_cpu.so",
            cuda=False,
        ),
    )
