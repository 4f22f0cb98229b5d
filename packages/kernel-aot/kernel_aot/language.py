"""The languages of kernels, and the files through which their compilers are asked: a request, and results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from kernel_aot.declaration import Reader, Variant
from kernel_format.errors import BuildError, ConfigError

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
        read: The architecture's number, the script's result, its file, and the source -> the compiled kernel.
        sources: An op, its compiled variants for each architecture, the source, and aot.toml -> the C++ files.
    """

    title: str
    programs: tuple[Path, ...]
    headers: tuple[str, ...]
    reader: type[Reader]
    left_out: re.Pattern[str] | None
    job: Callable[[Variant], dict[str, Any]]
    read: Callable[[int, dict[str, Any], Path, Path], Kernel]
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


def results(
    language: Language[Kernel], out: Path, pairs: Sequence[tuple[Variant, str]], source: Path
) -> Iterator[Kernel]:
    """Yield the compiled kernels of a request in the order of its pairs, from the directory `out/` beside it.

    Raises:
        BuildError: If the program ended early, or wrote something other than files.
        ConfigError: If a kernel cannot be compiled for an architecture.
    """
    if (out / "error.json").exists():
        error = json.loads(read_output(out / "error.json"))["error"]
        raise ConfigError(
            f"cannot be imported with {language.title} alone: {error}",
            where=str(source),
            hint="keep code that needs other modules at import out of the module with the kernels",
        )
    for number, (variant, arch) in enumerate(pairs):
        file = out / f"{number}.json"
        is_amd = arch.startswith("gfx")
        title = f"{variant.label} for {'' if is_amd else 'capability '}{arch}"
        if not file.exists():
            raise BuildError(f"{language.title}'s process ended while it compiled {title}", where=str(source))
        result: dict[str, Any] = json.loads(read_output(file))
        if error := result.get("error"):
            line = f":{result['line']}" if result["line"] else ""
            raise ConfigError(
                f"{variant.op.kernel} does not compile, {title}: {error}",
                where=f"{source}{line}",
                hint="correct the kernel, or its types and values in aot.toml",
            )
        kernel = language.read(arch_number(arch), result, file, source)
        if kernel.shared > (limit := shared_memory(arch_number(arch))):
            raise ConfigError(
                f"{title} needs {kernel.shared} bytes of shared memory, and a block has {limit}",
                where=str(source),
                hint=f"use smaller blocks or a smaller num_stages, or leave {arch} out of "
                + ("`rocm_archs` in build.toml" if is_amd else "`capabilities` in aot.toml"),
            )
        yield kernel


def read_output(path: Path) -> bytes:
    """Return the content of a file that the author's code may have replaced by a link to a private one."""
    if path.resolve() != path.parent.parent.resolve() / path.parent.name / path.name or not path.is_file():
        raise BuildError("is no file of the sandbox", where=str(path), hint="remove code that links files at import")
    return path.read_bytes()
