"""Completes the tables of aot.toml for `@cute.jit` functions of CuTe DSL, whose tensors have declared sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernel_aot.ops import DTYPES, Op, Variant
from kernel_aot.table_reader import Reader

STREAM = "stream"  # the parameter that is the stream
_TENSOR = re.compile(r"(\*\w+)\[([\w, ]+)\](:16)?")
_DTYPES = {"float8_e4m3fn": "Float8E4M3FN", "float8_e5m2": "Float8E5M2", "bfloat16": "BFloat16", "bool": "Boolean"}
_VALUES = {
    "i8": "Int8", "i16": "Int16", "i32": "Int32", "i64": "Int64", "u1": "Boolean", "i1": "Boolean", "u8": "Uint8",
    "u16": "Uint16", "u32": "Uint32", "u64": "Uint64", "fp32": "Float32", "fp64": "Float64",
}  # fmt: skip


@dataclass(frozen=True)
class CuteOp(Op):
    """An op of a `@cute.jit` function.

    Attributes:
        layouts: Parameter -> its tensor's sizes: numbers, and names of sizes that a call or a row determines.
        names: The function's parameters.
    """

    layouts: Mapping[str, tuple[str | int, ...]]
    names: tuple[str, ...]

    @property
    def inputs(self) -> list[str]:
        """The parameters at run time, in order."""
        given = {argument.name for argument in self.arguments} | {STREAM}
        return [name for name in self.names if name in given]

    def dynamic_sizes(self, name: str) -> list[int]:
        """Return the dimensions of a tensor whose sizes are arguments of the compiled function."""
        fixed = {key for config in self.configs for key in config.constants} | self.constants.keys()
        return [at for at, size in enumerate(self.layouts[name]) if isinstance(size, str) and size not in fixed]


class CuteReader(Reader):
    """Reads one op's table. Sizes become conditions of the call, and rows may fix them."""

    options: Mapping[str, int] = {}
    supplied = (STREAM,)

    def read(self) -> CuteOp:
        table = self.table
        for key in ("schema", "outputs", "arguments"):
            if key not in table:
                raise self.error(key, "is missing", "CuTe DSL's launch functions are not read: write the key")
        for key in ("grid", "divisible", "prefer_shared"):
            if key in table:
                hint = "remove it: the @cute.jit function computes launches; write `:16` after types of aligned tensors"
                raise self.error(key, "is a key of Triton's kernels", hint)
        table["grid"] = ()
        if STREAM not in self.names:
            hint = "add a parameter `stream: cuda.CUstream`, and pass it on to launch(stream=stream)"
            raise self.error("kernel", f"{table['kernel']} has no parameter for the stream", hint)
        layouts = self.layouts()
        self.sizes = tuple({size for sizes in layouts.values() for size in sizes if isinstance(size, str)})
        op = super().read()
        for argument in op.arguments:
            if not argument.is_tensor and argument.type not in _VALUES:
                raise self.error("types", f"{argument.name} is {argument.type}", f"expected {', '.join(_VALUES)}")
        for size in self.sizes:
            if len({size in config.constants for config in op.configs}) > 1:
                raise self.error("config", f"some rows set {size}, and others do not", "set it in each row, or in none")
        return CuteOp(**vars(op), layouts=layouts, names=tuple(self.names))

    def layouts(self) -> dict[str, tuple[str | int, ...]]:
        """Take the sizes out of the types, and add the conditions that they are for the op's arguments."""
        table = self.table
        types, requires = dict(table.get("types", {})), list(table.get("requires", ()))
        constants = table.get("constants", {})
        tensors = {parameter.name for parameter in self.parameters() if parameter.kind == "Tensor"}
        layouts: dict[str, tuple[str | int, ...]] = {}
        for name, value in table["arguments"].items():
            is_input = value in tensors
            match = _TENSOR.fullmatch(types.get(name, ""))
            if match is None:
                if is_input or value in table["outputs"] or "[" in types.get(name, ""):
                    hint = f'write for example types = {{ {name} = "*T[rows, n]" }}'
                    raise self.error("types", f"{name} is a tensor without sizes", hint)
                continue
            types[name] = match[1] + (match[3] or "")
            sizes = [text.strip() for text in match[2].split(",")]
            layouts[name] = tuple(int(text) if text.isdigit() else text for text in sizes)
            if not is_input:
                continue
            requires.append(f"{value}.dim() == {len(sizes)}")
            for at, size in enumerate(sizes):
                known = str(constants[size]) if size in constants else size if size.isdigit() else self.passed.get(size)
                if known:
                    requires.append(f"{value}.size({at}) == {known}")
                self.passed.setdefault(size, f"{value}.size({at})")
            requires.append(f"{value}.stride(-1) == 1 or {value}.size(-1) <= 1")
        table["types"], table["requires"] = types, requires
        return layouts


def job(variant: Variant) -> dict[str, Any]:
    """Return the parameters that a variant is compiled with, for `compile_cute.py`."""
    op = variant.op
    assert isinstance(op, CuteOp)
    parameters: dict[str, dict[str, Any]] = {STREAM: {"kind": "stream"}}
    for argument in op.arguments:
        kind = variant.signature[argument.name]
        if argument.is_tensor:
            dtype = DTYPES[kind[1:]]
            parameters[argument.name] = {
                "kind": "tensor",
                "value": [variant.constants.get(str(size), size) for size in op.layouts[argument.name]],
                "dtype": _DTYPES.get(dtype, dtype.capitalize()),
                "align": 16 if argument.is_divisible else 1,
            }
        else:
            parameters[argument.name] = {"kind": "value", "dtype": _VALUES[kind]}
    for name, value in variant.constants.items():
        if name in op.names:
            parameters[name] = {"kind": "constant", "value": value}
    return {"parameters": parameters}
