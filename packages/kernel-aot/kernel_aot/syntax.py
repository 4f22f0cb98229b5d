"""Reads the author's module as a syntax tree: its functions, and the pointers through which a kernel stores."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kernel_format.errors import ConfigError


def read_functions(path: Path) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module by name.

    Raises:
        ConfigError: If it is not Python, or too deeply nested for its parser.
    """
    try:
        module = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"is not Python: {error}", where=f"{path}{line}", hint="correct the module") from error
    return {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}


@contextmanager
def limited(where: str) -> Iterator[None]:
    """Turn the errors of Python for code that is nested too deeply, and for numbers that are too long, into ours."""
    try:
        yield
    except (RecursionError, ValueError) as error:
        hint = "use shorter expressions, and fewer functions that call each other"
        raise ConfigError(f"is too complex: {error}", where=where, hint=hint) from error


def stored_parameters(
    kernel: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], known: dict[str, set[str]] | None = None
) -> set[str]:
    """Return the names in a kernel through which it stores: parameters, and local names that are computed of them.

    Args:
        functions: The functions of the module, which the kernel may call.
        known: The results for functions, also for those that are being read, whose calls of themselves add nothing.
    """
    known = {} if known is None else known
    known[kernel.name] = set()
    sources: dict[str, set[str]] = {}
    stored: set[str] = set()
    for node in ast.walk(kernel):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                sources.setdefault(name, set()).update(_names(node.value))
        elif isinstance(node, ast.Call):
            called = last_name(node.func)
            if called in functions:
                callee = functions[called]
                passed = dict(zip([parameter.arg for parameter in callee.args.args], node.args, strict=False))
                passed |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
                of_callee = known[called] if called in known else stored_parameters(callee, functions, known)
                for name in of_callee & passed.keys():
                    stored |= _names(passed[name])
            elif node.args and called.startswith(("store", "atomic_")):
                stored |= _names(node.args[0]) | _names(node.func)  # of tl.store(pointer, x) and descriptor.store(...)
    while new := {source for name in stored for source in sources.get(name, ())} - stored:
        stored |= new
    known[kernel.name] = stored
    return stored


def last_name(function: ast.expr) -> str:
    """Return the last part of a dotted name: `load` of `tl.load`."""
    return ast.unparse(function).rpartition(".")[2]


def _names(node: ast.AST) -> set[str]:
    """Return the names in an expression, except in loads: a loaded value is not a pointer of the kernel's arguments."""
    if isinstance(node, ast.Call) and last_name(node.func) == "load":
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    return {name for child in ast.iter_child_nodes(node) for name in _names(child)}
