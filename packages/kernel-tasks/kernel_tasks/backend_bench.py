"""BackendBench: serialized arguments of an ATen operator, from a trace (`.txt`) or a table (`.parquet`).

A trace has lines `Operator: aten.add.Tensor`, and for each `cnt: 3, ((T([2, 4], f16), ...), {})`. A file with several
operators is named with one of them: `trace.txt::aten.add.Tensor`. A candidate defines `add__Tensor_kernel_impl` with
the operator's arguments.
"""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.testing import assert_close, make_tensor

from kernel_format.errors import ConfigError
from kernel_tasks.task import CANDIDATE, PROBLEM, Files, Problem, Sizes, Task

FORMAT = "BackendBench: a trace (.txt) or a table (.parquet) of operators, FILE::OPERATOR if it has several"
_DTYPES = {
    "bf16": torch.bfloat16,
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "c32": torch.complex32,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "b8": torch.bool,
    "u8": torch.uint8,
}
_NAMES = {"inf": math.inf, "nan": math.nan, **_DTYPES}
_ATTRIBUTES = (torch.dtype, torch.layout, torch.memory_format)  # the types of torch's constants
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TOLERANCE = 1e-2
_RENAMED = {"aten.sum.SymInt": "aten.sum.dim_IntList"}
_MODEL = """import torch
{statement}


class {name}(torch.nn.Module):
    def forward(self, arguments, options):
        return {function}(*arguments, **options)
"""


@dataclass
class BackendBenchTask(Task):
    """An operator with its serialized arguments."""

    operator: str = ""  # such as "add.Tensor"

    def model_files(self, sizes: Sizes) -> Files:
        """Return a `Model` that calls the operator."""
        text = _MODEL.format(statement="", function=f"torch.ops.aten.{self.operator}", name="Model")
        return {PROBLEM: text.encode()}

    def candidate_files(self, path: Path) -> Files:
        """Return an implementation, and a `ModelNew` that calls it.

        The path is a file, the operator's directory, or a directory of those.
        """
        folder = self.operator.replace(".", "__")
        files = [path]
        if path.is_dir():
            place = path / folder if (path / folder).is_dir() else path
            files = sorted(place.glob(f"{folder}_implementation*.py"))
        if not files:
            raise ConfigError(
                f"has no {folder}/{folder}_implementation*.py",
                where=str(path),
                hint=f"define {folder}_kernel_impl in it",
            )
        function = f"{folder}_kernel_impl"
        model = _MODEL.format(statement=f"from implementation import {function}", function=function, name="ModelNew")
        return {"implementation.py": files[0].read_bytes(), CANDIDATE: model.encode()}

    def weight(self, sizes: Sizes) -> int:
        """Return the number of elements of the tensors."""
        elements = 0

        def count(shape: Sequence[int], *_: Any, **__: Any) -> None:
            nonlocal elements
            elements += math.prod(shape)

        self._evaluated(sizes, count)
        return elements

    def problem(self, sizes: Sizes) -> Problem:
        """Return the operator with the inputs that the arguments describe."""
        packet, _, overload = self.operator.partition(".")
        function: Any = getattr(getattr(torch.ops.aten, packet), overload or "default")

        class Model(torch.nn.Module):
            def forward(self, arguments: Any, options: Any) -> Any:
                return function(*arguments, **options)

        return Problem(Model, lambda: list(self._evaluated(sizes, _tensor)), fault=_fault)

    def tolerance(self) -> str:
        """Return the rule for right results."""
        return f"each element within {_TOLERANCE} + {_TOLERANCE} |expected|"

    def _evaluated(self, sizes: Sizes, tensor: Callable[..., Any]) -> Any:
        """Return serialized arguments, with what a function returns in place of each `T(...)`."""
        text = re.sub(r'["\']torch\.device\((.*?)\)["\']', r"torch.device(\1)", sizes["arguments"])
        text = re.sub(rf"'({'|'.join(_DTYPES)})'", r"\1", text)
        try:
            return _value(ast.parse(text, mode="eval").body, tensor)
        except Exception as error:
            raise ConfigError(
                f"the arguments cannot be read: {type(error).__name__}: {error}",
                where=f"{self.path}: {self.operator}",
                hint=f"expected ((T([2, 4], f16), ...), {{}}), got {text}",
            ) from error


def _value(node: ast.expr, tensor: Callable[..., Any]) -> Any:
    """Return the value of an expression, which is data: a trace may come from anyone."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Tuple(items):
            return tuple(_value(item, tensor) for item in items)
        case ast.List(items):
            return [_value(item, tensor) for item in items]
        case ast.Dict(keys, values):
            return {
                ast.literal_eval(key): _value(value, tensor) for key, value in zip(keys, values, strict=True) if key
            }
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, tensor)
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
        case ast.Attribute(ast.Name("torch" | "th"), name) if isinstance(getattr(torch, name, None), _ATTRIBUTES):
            return getattr(torch, name)
        case ast.Call(ast.Name("T"), arguments, keywords):
            named = {keyword.arg or "": _value(keyword.value, tensor) for keyword in keywords}
            return tensor(*(_value(argument, tensor) for argument in arguments), **named)
        case ast.Call(ast.Attribute(ast.Name("torch" | "th"), "device"), [ast.Constant(str(name))], []):
            return torch.device(name)
    raise ValueError(f"`{ast.unparse(node)}` is not a value")


def _tensor(shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None, device: Any = None) -> Any:
    limits: dict[str, Any] = {"low": 0, "high": 1} if dtype in _FLOATS else {}
    device = torch.empty(0).device
    if stride is None:
        return make_tensor(tuple(shape), dtype=dtype, device=device, **limits)
    extent = 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return make_tensor(extent, dtype=dtype, device=device, **limits).as_strided(tuple(shape), tuple(stride))


def _fault(arguments: Any, results: Sequence[Any], expected: Sequence[Any]) -> str | None:
    try:
        for reference, result in zip(expected, results, strict=True):
            assert_close(reference, result, atol=_TOLERANCE, rtol=_TOLERANCE, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def recognizes(path: Path) -> bool:
    """Return whether a path is a trace or a table, with or without the name of an operator."""
    file, _ = _parted(path)
    return file.suffix == ".parquet" or (file.suffix == ".txt" and "Operator: " in _text(file))


def read(path: Path) -> Task:
    """Read the arguments of one operator of a trace or a table."""
    file, chosen = _parted(path)
    operators = _of_table(file) if file.suffix == ".parquet" else _of_trace(_text(file))
    name = chosen or (next(iter(operators)) if len(operators) == 1 else "")
    if name not in operators:
        raise ConfigError(
            f"has {len(operators)} operators, and {chosen or 'none'} is named; expected one of {', '.join(operators)}",
            where=str(file),
            hint=f"name one: {file}::{next(iter(operators), 'aten.add.Tensor')}",
        )
    operator = name.removeprefix("aten.")
    folder = operator.replace(".", "__")
    packet, _, overload = operator.partition(".")
    function = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if function is None:
        raise ConfigError(f"Torch has no operator {name}", where=str(file), hint="use another release of Torch")
    if any(argument.name == "filename" for argument in function._schema.arguments):
        raise ConfigError(f"{name} opens files", where=str(file), hint="name an operator of tensors")
    lines = dict.fromkeys(operators[name])
    trace = "\n".join([f"Operator: {name}", *(f"cnt: 1, {line}" for line in lines)]) + "\n"
    return BackendBenchTask(
        name=name,
        path=file,
        files={f"{name}.txt": trace.encode()},
        form=f"A candidate defines `{folder}_kernel_impl` with the arguments and results of `torch.ops.{name}`.",
        workloads=tuple({"arguments": line} for line in lines),
        timed=len(lines),
        entry=f"{name}.txt",
        operator=operator,
    )


def _parted(path: Path) -> tuple[Path, str]:
    file, _, operator = str(path).partition("::")
    return Path(file), operator


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _of_trace(text: str) -> dict[str, list[str]]:
    operators: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("Operator: "):
            name = line.removeprefix("Operator: ").strip()
            name = _RENAMED.get(name, name)
        elif (found := re.match(r"cnt: \d+, (.*)", line)) and name:
            operators.setdefault(name, []).append(found[1])
    return operators


def _of_table(file: Path) -> dict[str, list[str]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "pyarrow is not installed, which reads tables", where=str(file), hint="pip install pyarrow"
        ) from error
    operators: dict[str, list[str]] = {}
    for row in parquet.read_table(file, columns=["op_name", "args", "included_in_benchmark"]).to_pylist():
        if row["included_in_benchmark"]:
            operators.setdefault(row["op_name"], []).append(row["args"])
    return operators
