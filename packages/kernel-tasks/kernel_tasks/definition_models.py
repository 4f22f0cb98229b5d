"""The models of a definition: its reference, and a solution. Other processes import this module as well."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import linecache
import operator
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernel_format.errors import ConfigError

DEFINITION, SOLUTION = "definition.json", "solution.json"
CPP_SUFFIXES = (".cu", ".cpp", ".cc", ".cxx", ".c")
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file with one object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where=str(file), hint="correct the line that is named") from error
    return content if isinstance(content, dict) else {}


def axis_values(definition: Mapping[str, Any], bound: Mapping[str, Any]) -> dict[str, int]:
    """Return the values of all axes, with the variable ones bound.

    Raises:
        KeyError: If a variable axis has no value.
        ValueError: If an expression is not one of the format.
    """
    values: dict[str, int] = {}
    for name, axis in definition["axes"].items():
        if axis["type"] != "expr":
            values[name] = axis["value"] if axis["type"] == "const" else bound[name]
    for name, axis in definition["axes"].items():
        if axis["type"] == "expr":
            values[name] = int(_evaluated(ast.parse(axis["expression"], mode="eval").body, values))
    return values


def _evaluated(node: ast.expr, values: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return values[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluated(left, values), _evaluated(right, values))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluated(operand, values))
    raise ValueError(f"{ast.unparse(node)} is not an expression of axes")


def tensor_shape(names: Sequence[str], axes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape; its entries name axes, or are numbers."""
    return tuple(int(name) if str(name).isdigit() else axes[name] for name in names)


def reference_model(file: str) -> type[torch.nn.Module]:
    """Return the `Model` of the definition beside a file, for another process."""
    path = Path(file).parent / DEFINITION
    definition = read_json(path)
    return model_of(run_reference(definition, str(path)), definition)


def run_reference(definition: Mapping[str, Any], path: str) -> types.ModuleType:
    """Run the reference of a definition, with its source where `inspect` finds it: Triton reads it there."""
    module = types.ModuleType("definition_reference")
    sys.modules[module.__name__] = module  # where torch.compile looks for it
    module.__file__ = f"{path}: reference"
    text = definition["reference"]
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    try:
        exec(compile(text, module.__file__, "exec"), vars(module))
    except Exception as error:
        raise ConfigError(f"cannot be run: {type(error).__name__}: {error}", where=module.__file__) from error
    if not hasattr(module, "run"):
        raise ConfigError("defines no function run", where=module.__file__, hint="name the function run")
    return module


def model_of(module: types.ModuleType, definition: Mapping[str, Any]) -> type[torch.nn.Module]:
    """Return a class whose forward calls `run` of a reference."""

    class Model(torch.nn.Module):
        def forward(self, *inputs: Any) -> list[torch.Tensor]:
            return _as_outputs(module.run(*inputs), definition)

    return Model


def _as_outputs(value: Any, definition: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the outputs of a function in the order of the definition; numbers become tensors."""
    outputs = definition["outputs"]
    if isinstance(value, dict):
        value = [value[name] for name in outputs]
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    dtypes = [getattr(torch, spec["dtype"]) for spec in outputs.values()]
    return [
        item if isinstance(item, torch.Tensor) else torch.tensor(item, dtype=dtype)
        for item, dtype in zip(values, dtypes, strict=True)
    ]


def solution_model(file: str) -> type[torch.nn.Module]:
    """Return the `ModelNew` of the solution beside a file: it builds its sources, and allocates the outputs."""
    directory = Path(file).parent
    definition, spec = read_json(directory / DEFINITION), read_json(directory / SOLUTION)["spec"]
    function = _entry_point(directory, spec)
    inputs, outputs = definition["inputs"], definition["outputs"]
    has_destinations = spec.get("destination_passing_style")
    if has_destinations is None:  # older solutions and files without solution.json; a binary has no signature
        is_python = inspect.isfunction(function)
        has_destinations = not is_python or _positional(function) > len(inputs)

    class ModelNew(torch.nn.Module):
        def forward(self, *arguments: Any) -> list[torch.Tensor]:
            if not has_destinations:
                return _as_outputs(function(*arguments), definition)
            bound: dict[str, int] = {}
            device = None
            for value, entry in zip(arguments, inputs.values(), strict=True):
                if isinstance(value, torch.Tensor):
                    bound |= zip(entry["shape"], value.shape, strict=True)
                    device = value.device
            axes = axis_values(definition, bound)
            results = [
                torch.zeros(tensor_shape(entry["shape"], axes), dtype=getattr(torch, entry["dtype"]), device=device)
                for entry in outputs.values()
            ]
            function(*arguments, *results)
            return results

    return ModelNew


def _positional(function: Callable[..., Any]) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )


def _entry_point(directory: Path, spec: Mapping[str, Any]) -> Callable[..., Any]:
    """Import or compile the sources of a solution, and return its function."""
    name, _, symbol = spec["entry_point"].partition("::")
    if Path(name).suffix == ".py":
        sys.path.insert(0, str(directory))
        module: Any = importlib.import_module(name.removesuffix(".py").replace("/", "."))
    elif spec.get("binding", "torch" if "languages" in spec else None) == "torch":
        from torch.utils import cpp_extension

        options, cutlass = spec.get("compile_options") or {}, os.environ.get("CUTLASS_DIR", "/usr/local/cutlass")
        module = cpp_extension.load(
            "benchmark_kernel",
            [str(path) for path in sorted(directory.rglob("*")) if path.suffix in CPP_SUFFIXES],
            extra_cflags=options.get("cflags"),
            extra_cuda_cflags=options.get("cuda_cflags"),
            extra_ldflags=options.get("ld_flags"),
            extra_include_paths=[str(directory), f"{cutlass}/include", f"{cutlass}/tools/util/include"],
        )
    else:
        import tvm_ffi

        files = sorted(directory.rglob("*"))
        library = tvm_ffi.cpp.build(
            name="benchmark_kernel",
            cpp_files=[str(path) for path in files if path.suffix in CPP_SUFFIXES[1:]],
            cuda_files=[str(path) for path in files if path.suffix == ".cu"],
            extra_include_paths=[str(directory)],
            extra_ldflags=["-lcuda", "-lcublas"] if any(path.suffix == ".cu" for path in files) else [],
        )
        module = tvm_ffi.load_module(library)
    function: Callable[..., Any] = getattr(module, symbol)
    return function
