"""Reads the author's module as a syntax tree: its functions, and the pointers through which a kernel stores."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterator, Mapping
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
    kernel: ast.FunctionDef,
    functions: Mapping[str, ast.FunctionDef],
    known: dict[str, set[str]] | None = None,
    elsewhere: set[str] | None = None,
) -> set[str]:
    """Return the names in a kernel through which it stores: parameters, and local names that are computed of them.

    Args:
        functions: The functions of the module, which the kernel may call.
        known: The results for functions, also for those that are being read, whose calls of themselves add nothing.
        elsewhere: If given, it gets the functions of other modules, and they count as storing through their arguments.
    """
    known = {} if known is None else known
    known[kernel.name] = set()
    sources: dict[str, set[str]] = {}
    stored: set[str] = set()
    nodes = list(ast.walk(ast.Module(kernel.body, [])))
    local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    local |= {parameter.arg for parameter in ast.walk(kernel.args) if isinstance(parameter, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.comprehension):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.iter if isinstance(node, ast.For | ast.comprehension) else node.value
            for name in (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                sources.setdefault(name, set()).update(_names(value) if value else ())
        elif isinstance(node, ast.Call):
            called = last_name(node.func)
            passed = dict(enumerate(node.args)) | {each.arg: each.value for each in node.keywords}
            everything = {name for value in passed.values() for name in _names(value)}
            if isinstance(node.func, ast.Name) and called in functions:
                callee = functions[called]
                of_callee = known[called] if called in known else stored_parameters(callee, functions, known, elsewhere)
                if callee.args.vararg or any(isinstance(value, ast.Starred) for value in node.args):
                    stored |= everything if of_callee else set()
                for position, parameter in enumerate((*callee.args.args, *callee.args.kwonlyargs)):
                    if parameter.arg in of_callee and (value := passed.get(parameter.arg, passed.get(position))):
                        stored |= _names(value)
                continue
            if called.startswith(("store", "atomic_")):  # tl.store(pointer, x), descriptor.store(...)
                pointer = passed.get(0, passed.get("pointer", node.func))
                stored |= _names(pointer) | _names(node.func)
            if elsewhere is not None and called != "load" and _is_elsewhere(node.func, local):
                elsewhere.add(ast.unparse(node.func))
                stored |= everything
    while new := {source for name in stored for source in sources.get(name, ())} - stored:
        stored |= new
    known[kernel.name] = stored
    return stored


def _is_elsewhere(function: ast.expr, local: Collection[str]) -> bool:
    """Return whether a kernel calls neither Triton nor a value's method. Assembly may store, too."""
    root = ast.unparse(function).partition(".")[0]
    if isinstance(function, ast.Name) or not root.isidentifier():
        return isinstance(function, ast.Name) and not hasattr(builtins, root)
    return last_name(function) == "inline_asm_elementwise" or root not in {*local, "tl", "triton", "libdevice", "math"}


def last_name(function: ast.expr) -> str:
    """Return the last part of a dotted name: `load` of `tl.load`."""
    return ast.unparse(function).rpartition(".")[2]


def _names(node: ast.AST) -> set[str]:
    """Return the names in an expression, except in loads: a loaded value is not a pointer of the kernel's arguments."""
    if isinstance(node, ast.Call) and last_name(node.func) == "load":
        return set()
    if isinstance(node, ast.Attribute) and node.attr in ("dtype", "type"):
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    return {name for child in ast.iter_child_nodes(node) for name in _names(child)}
