"""The language Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel_aot import cpp_code, images
from kernel_aot.declaration import Op, Reader, Variant
from kernel_aot.images import Cubin
from kernel_aot.language import Language, read_output


def _job(variant: Variant) -> dict[str, Any]:
    return {
        "signature": dict(variant.signature),
        "constants": dict(variant.constants),
        "divisible": variant.divisible,
        "options": dict(variant.config.options),
    }


def _read(capability: int, result: dict[str, Any], file: Path, source: Path) -> Cubin:
    image, text = read_output(file.with_suffix(".cubin")), read_output(file.with_suffix(".ptx")) + b"\0"
    return Cubin(capability, is_ptx=False, image=image, **result, ptx=text)


def _sources(op: Op, compiled: Sequence[Sequence[Cubin]], source: str, tables: Mapping[str, Any]) -> dict[str, str]:
    rows = [_with_ptx(row) for row in compiled] if tables.get("ptx") else compiled
    return {f"{op.name}.cpp": cpp_code.launcher(op, source), f"{op.name}_cubins.cpp": images.images(op, rows)}


def _with_ptx(cubins: Sequence[Cubin]) -> tuple[Cubin, ...]:
    """Return cubins, and PTX of the newest capability whose PTX later GPUs run: from 9.0 on, only the same one does."""
    portable = [cubin for cubin in cubins if cubin.capability < 90]
    newest = max(portable, key=lambda cubin: cubin.capability, default=None)
    return (*cubins, *([replace(newest, is_ptx=True, image=newest.ptx)] if newest else []))


TRITON = Language(
    title="Triton",
    programs=(Path(__file__).with_name("compile_kernels.py"),),
    headers=("driver.h", "images.h", "launch.h"),
    reader=Reader,
    left_out=None,
    job=_job,
    read=_read,
    sources=_sources,
)
