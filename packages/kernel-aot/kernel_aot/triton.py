"""The language Triton."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernel_aot import images
from kernel_aot.cpp_code import configuration, launcher, stored
from kernel_aot.images import Cubin, checked_name
from kernel_aot.language import Language
from kernel_aot.ops import Op, Variant
from kernel_aot.table_reader import Reader


def _job(variant: Variant) -> dict[str, Any]:
    return {
        "signature": dict(variant.signature),
        "constants": dict(variant.constants),
        "divisible": variant.divisible,
        "options": dict(variant.config.options),
    }


def _read(capability: int, result: dict[str, Any], outputs: Sequence[bytes], source: str) -> Cubin:
    threads, shared, scratch = (operator.index(result[key]) for key in ("threads", "shared", "scratch"))
    name = checked_name(result["name"])
    return Cubin(capability, False, outputs[0], name, threads, shared, scratch, ptx=outputs[1] + b"\0")


def _sources(op: Op, compiled: Sequence[Sequence[Cubin]], source: str, tables: Mapping[str, Any]) -> dict[str, str]:
    rows = [_with_ptx(row) for row in compiled] if tables.get("ptx") else compiled
    code = launcher(op, source, "launch.h", f"aot::Kernel {op.name}_kernels[]", _launch(op))
    return {f"{op.name}.cpp": code, f"{op.name}_cubins.cpp": images.images(op, rows)}


def _with_ptx(cubins: Sequence[Cubin]) -> tuple[Cubin, ...]:
    """Return cubins, and PTX of the newest capability whose PTX later GPUs run: from 9.0 on, only the same one does."""
    portable = [cubin for cubin in cubins if cubin.capability < 90]
    newest = max(portable, key=lambda cubin: cubin.capability, default=None)
    return (*cubins, *([replace(newest, is_ptx=True, image=newest.ptx)] if newest else []))


def _launch(op: Op) -> Iterator[str]:
    """Yield the statements that choose a compilation by the arguments, and launch it."""
    addresses = []
    for argument in op.arguments:
        if argument.type != "1":
            yield from stored(op, argument)
            value = f"&{argument.name}_value"
            narrow = f"wide ? static_cast<void*>({value}) : &{argument.name}_narrow"
            addresses.append(narrow if argument.type == "int" else value)
    index = configuration(op)
    if op.hints[1:]:
        yield f"int hints = {len(op.hints) - 1};"
        for number in reversed(range(len(op.hints) - 1)):
            chosen = [argument for argument in op.arguments if argument.name in op.hints[number]]
            tests = [f"aot::divisible({a.name}{'_value' if a.is_tensor else ''})" for a in chosen]
            yield f"if ({' && '.join(tests)}) hints = {number};"
        index = f"({index}) * {len(op.hints)} + hints"
    wide = [argument for argument in op.arguments if argument.type == "int"]
    if wide:
        yield f"const bool wide = !({' && '.join(f'aot::is_int32({argument.name})' for argument in wide)});"
        index = f"({index}) * 2 + (wide ? 1 : 0)"
    yield f"void* arguments[] = {{{', '.join([*addresses, 'nullptr', 'nullptr'])}}};"
    yield f"aot::launch({op.name}_kernels[{index}], {op.first_tensor}, grid[0], grid[1], grid[2], arguments);"


TRITON = Language(
    title="Triton",
    programs=(Path(__file__).with_name("compile_kernels.py"),),
    headers=("driver.h", "images.h", "launch.h"),
    reader=Reader,
    left_out=None,
    job=_job,
    outputs=(".cubin", ".ptx"),
    read=_read,
    sources=_sources,
)
