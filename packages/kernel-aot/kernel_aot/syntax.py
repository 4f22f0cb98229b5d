"""Reads the author's module as a syntax tree: its functions, and the pointers through which a kernel stores."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path

from kernel_format.errors import ConfigError

_MOST_STORES = 1000  # of one function, with different parameters in their pointers


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


def find_stores(
    kernel: ast.FunctionDef,
    functions: Mapping[str, ast.FunctionDef],
    known: dict[str, tuple[Collection[Set[str]], Set[str]]] | None = None,
    elsewhere: dict[str, None] | None = None,
) -> tuple[Collection[Set[str]], Set[str]]:
    """Return the parameters of which the pointer of each store is computed, and those of which the result is computed.

    A pointer that is loaded is computed of none: it may be any tensor's.

    Args:
        functions: The functions of the module, which the kernel may call.
        known: The results for functions, also for those that are being read, whose calls of themselves add nothing.
        elsewhere: If given, functions of other modules become its keys, and count as storing through their arguments.
    """
    known = {} if known is None else known
    if kernel.name in known:
        return known[kernel.name]
    known[kernel.name] = [], set()
    sources: dict[str, set[str]] = {}
    stores: list[set[str]] = []
    result: set[str] = set()
    nodes = list(ast.walk(ast.Module(kernel.body, [])))
    parameters = {parameter.arg for parameter in ast.walk(kernel.args) if isinstance(parameter, ast.arg)}
    local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)} | parameters

    def names(node: ast.AST | None) -> set[str]:
        """Return the names in an expression, except in loads."""
        is_load = isinstance(node, ast.Call) and last_name(node.func) == "load"
        if node is None or is_load or (isinstance(node, ast.Attribute) and node.attr in ("dtype", "type")):
            return set()
        if isinstance(node, ast.Call) and (callee := functions.get(ast.unparse(node.func))):
            return passed(node, callee, find_stores(callee, functions, known, elsewhere)[1])
        return {node.id} if isinstance(node, ast.Name) else set().union(*map(names, ast.iter_child_nodes(node)))

    def passed(call: ast.Call, callee: ast.FunctionDef, wanted: Set[str]) -> set[str]:
        """Return the names in a call's arguments for some parameters."""
        every = [parameter.arg for parameter in ast.walk(callee.args) if isinstance(parameter, ast.arg)]
        values = [*zip(every, call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
        is_any = callee.args.vararg or any(isinstance(value, ast.Starred) for value in call.args)
        return set().union(*(names(value) for name, value in values if name in wanted or (is_any and wanted)))

    for node in nodes:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.comprehension):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.iter if isinstance(node, ast.For | ast.comprehension) else node.value
            for name in (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                sources.setdefault(name, set()).update(names(value))
        elif isinstance(node, ast.Return):
            result |= names(node.value)
        elif isinstance(node, ast.Call) and (callee := functions.get(ast.unparse(node.func))):
            pointers, _ = find_stores(callee, functions, known, elsewhere)
            stores += [passed(node, callee, pointer) for pointer in pointers]
        elif isinstance(node, ast.Call):
            if last_name(node.func).startswith(("store", "atomic_")):  # tl.store(pointer, x), descriptor.store(...)
                named = [each.value for each in node.keywords if each.arg == "pointer"]
                stores.append(names([*node.args, *named, node.func][0]) | names(node.func))
            if elsewhere is not None and last_name(node.func) != "load" and _is_elsewhere(node.func, local):
                elsewhere[ast.unparse(node.func)] = None
                stores.append(set().union(*map(names, [*node.args, *(each.value for each in node.keywords)])))
    for found in (*stores, result):
        while new := {source for name in found for source in sources.get(name, ())} - found:
            found.update(new)
    known[kernel.name] = {frozenset(found & parameters) for found in stores}, result & parameters
    if len(known[kernel.name][0]) > _MOST_STORES:
        raise ValueError(f"{kernel.name} stores through more than {_MOST_STORES} pointers")
    return known[kernel.name]


def _is_elsewhere(function: ast.expr, local: Collection[str]) -> bool:
    """Return whether a kernel calls neither Triton nor a value's method. Assembly may store, too."""
    root = ast.unparse(function).partition(".")[0]
    if isinstance(function, ast.Name) or not root.isidentifier():
        return isinstance(function, ast.Name) and not hasattr(builtins, root)
    return last_name(function) == "inline_asm_elementwise" or root not in {*local, "tl", "triton", "libdevice", "math"}


def last_name(function: ast.expr) -> str:
    """Return the last part of a dotted name: `load` of `tl.load`."""
    return ast.unparse(function).rpartition(".")[2]
