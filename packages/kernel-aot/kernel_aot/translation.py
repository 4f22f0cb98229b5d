"""From the tables of aot.toml to the files of the generated project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_aot import cpp_code, python_code
from kernel_aot.cute_code import CUTE_DSL
from kernel_aot.language import CompiledKernel, Language
from kernel_aot.ops import Op, variants
from kernel_aot.syntax import limited, read_functions
from kernel_aot.triton import TRITON
from kernel_format.errors import ConfigError

_HEADERS = Path(__file__).with_name("headers")
_LANGUAGES: Mapping[str, Language[Any]] = {"triton": TRITON, "cute-dsl": CUTE_DSL}


def select_language(tables: Mapping[str, Any]) -> Language[Any]:
    """Return the language of a project's kernels."""
    return _LANGUAGES[tables.get("language", "triton")]


def read_ops(root: Path, tables: Mapping[str, Any]) -> tuple[Op, ...]:
    """Return the ops that a project's aot.toml declares.

    Args:
        root: The project's directory.
        tables: The tables of aot.toml, which are valid.

    Raises:
        ConfigError: If a table does not fit its kernel, or has an expression that is none.
    """
    source = root / tables["source"]
    functions = read_functions(source)
    read = select_language(tables).reader
    with limited(str(source)):
        return tuple(read(root / "aot.toml", source, functions, name, op).read() for name, op in tables["op"].items())


def sources(
    root: Path, tables: Mapping[str, Any], project: str, ops: Sequence[Op], kernels: Sequence[Sequence[CompiledKernel]]
) -> dict[str, str]:
    """Return the generated files of a project: path -> text. They are C++ in `aot/`, and the module of the ops.

    Args:
        project: The project's name, for error messages at run time.
        kernels: The compiled kernels of each variant of each op, ascending by architecture.

    Raises:
        ConfigError: If the author's module has functions that are neither kernels nor ops.
    """
    used = select_language(tables)
    source = Path(tables["source"])
    text = (root / source).read_text(encoding="utf-8")
    with limited(str(root / source)):
        module = python_code.module(ops, text, source.as_posix(), len(source.parts) - 2)
    code = {name: (_HEADERS / name).read_text(encoding="utf-8") for name in used.headers}
    code["binding.cpp"] = cpp_code.binding(project, ops)
    remaining = iter(kernels)
    for op in ops:
        if {f"{op.name}.cpp", f"{op.name}_cubins.cpp"} & code.keys():
            raise ConfigError(
                "another op has a source of the same name, or the registration",
                where=f"{root / 'aot.toml'}: [op.{op.name}]",
                hint="rename the op and its launch function",
            )
        code |= used.sources(op, [next(remaining) for _ in variants(op)], source.as_posix(), tables)
    return {source.as_posix(): module, **{f"aot/{name}": text for name, text in code.items()}}
