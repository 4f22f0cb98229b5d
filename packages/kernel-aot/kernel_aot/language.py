"""The languages of kernels, and the requests to their compilers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from kernel_aot.ops import Variant
from kernel_aot.table_reader import Reader

# Number of an architecture -> bytes of shared memory that a block may use.
_SHARED = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 120: 101_376, 121: 101_376, 0x950: 163_840}
_SHARED_FROM_9, _SHARED_OF_AMD = 232_448, 65_536
_AMD = 0x900  # the lowest number of an architecture of AMD


class CompiledKernel(Protocol):
    """A compiled kernel; `shared` is the number of bytes of shared memory that a block needs."""

    @property
    def shared(self) -> int: ...


Kernel = TypeVar("Kernel", bound=CompiledKernel)


@dataclass(frozen=True)
class Language(Generic[Kernel]):
    """A language of kernels, and its compiler.

    Attributes:
        title: The compiler's name.
        programs: The scripts that run the compiler; the first one is started, with the request and the compiler.
        headers: The headers that the generated C++ includes.
        reader: The class that reads the ops' tables.
        left_out: Matches modules that only kernels need, and that the generated project does not have.
        job: A variant -> its part of the request.
        outputs: The suffixes of the files that a job has besides its result.
        read: The architecture's number, a job's result, the files of `outputs`, and the source -> the compiled kernel.
        sources: An op, its compiled variants for each architecture, the source, and aot.toml -> the C++ files.
    """

    title: str
    programs: tuple[Path, ...]
    headers: tuple[str, ...]
    reader: type[Reader]
    left_out: re.Pattern[str] | None
    job: Callable[[Variant], dict[str, Any]]
    outputs: tuple[str, ...]
    read: Callable[[int, dict[str, Any], Sequence[bytes], str], Kernel]
    sources: Callable[[Any, Sequence[Sequence[Kernel]], str, Mapping[str, Any]], dict[str, str]]


def arch_number(arch: str) -> int:
    """Return the number of an architecture in generated code: 90 for 9.0, and 0x942 for gfx942."""
    return int(arch.removeprefix("gfx"), 16) if arch.startswith("gfx") else int(arch.replace(".", ""))


def shared_memory(capability: int) -> int:
    """Return the bytes of shared memory that a block may use; see `arch_number`."""
    return _SHARED.get(capability, _SHARED_FROM_9 if capability < _AMD else _SHARED_OF_AMD)


def request(
    language: Language[Any], package: str, source: Path, pairs: Sequence[tuple[Variant, str]], processes: int
) -> dict[str, Any]:
    """Return the request for a language's program, which is written as JSON.

    Args:
        package: The name of the author's Python package, a directory of `src/` beside the request.
        source: The module with the kernels, as in aot.toml.
        pairs: The variants to compile, with their architectures.
        processes: The number of processes that compile.
    """
    jobs = [
        {"number": number, "kernel": variant.op.kernel, "target": _target(arch), **language.job(variant)}
        for number, (variant, arch) in enumerate(pairs)
    ]
    module = ".".join(source.with_suffix("").parts[1:])
    return {"package": package, "module": module, "processes": processes, "jobs": jobs}


def _target(arch: str) -> tuple[str, str | int, int]:
    """Return the arguments of Triton's GPUTarget. AMD's compiler replaces the size of a warp where it is another."""
    return ("hip", arch, 64) if arch.startswith("gfx") else ("cuda", arch_number(arch), 32)
