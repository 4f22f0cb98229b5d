"""Reads the files that a language's program has written in answer to a request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kernel_aot.language import CompiledKernel, Language, arch_number, shared_memory
from kernel_aot.ops import Variant
from kernel_format.errors import BuildError, ConfigError

_MOST_BYTES = 64 << 20  # of a file
_HINT = "remove code from the module with the kernels that replaces the compiler's files"


def answers(
    language: Language[Any], out: Path, pairs: Sequence[tuple[Variant, str]], source: Path
) -> Iterator[CompiledKernel]:
    """Yield the compiled kernels of a request. The author's module ran beside the compiler: no file is trusted.

    Raises:
        BuildError: If a file is missing, too large, a link, or of another form.
        ConfigError: If a kernel does not compile.
    """
    if (out / "error.json").exists():
        error = _answer(out / "error.json").get("error")
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
        result = _answer(file)
        if error := result.get("error"):
            line = f":{result['line']}" if isinstance(result.get("line"), int) else ""
            raise ConfigError(
                f"{variant.op.kernel} does not compile, {title}: {error}",
                where=f"{source}{line}",
                hint="correct the kernel, or its types and values in aot.toml",
            )
        outputs = [_read_output(file.with_suffix(suffix)) for suffix in language.outputs]
        try:
            kernel: CompiledKernel = language.read(arch_number(arch), result, outputs, str(source))
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise BuildError(f"no answer of {language.title} for {title}: {problem!r}", where=str(source)) from problem
        if kernel.shared > (limit := shared_memory(arch_number(arch))):
            raise ConfigError(
                f"{title} needs {kernel.shared} bytes of shared memory, and a block has {limit}",
                where=str(source),
                hint=f"use smaller blocks or a smaller num_stages, or leave {arch} out of "
                + ("`rocm_archs` in build.toml" if is_amd else "`capabilities` in aot.toml"),
            )
        yield kernel


def _answer(path: Path) -> dict[str, Any]:
    try:
        answer = json.loads(_read_output(path))
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise BuildError("is not an answer of the compiler", where=str(path), hint=_HINT)
    return answer


def _read_output(path: Path) -> bytes:
    """Return the content of a file that the author's code may have replaced by a link to a private one."""
    if path.resolve() != path.parent.parent.resolve() / path.parent.name / path.name or not path.is_file():
        raise BuildError("is not a file of the sandbox", where=str(path), hint=_HINT)
    if path.stat().st_size > _MOST_BYTES:
        raise BuildError(f"has more than {_MOST_BYTES >> 20} MB", where=str(path), hint=_HINT)
    return path.read_bytes()
