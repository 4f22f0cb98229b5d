"""The imports of a package's files, and which of them every load of the package executes.

Loading a package executes `__init__.py`, and of each executed module the statements outside of functions. An import
there must succeed on every machine. An import in a function, under a condition, in a `try` that catches its absence, or
in a file that no executed import leads to need not succeed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from kernel_builder.checks.python_files import Source, catches_absence

# `always` when the module is executed; `guarded` where absence is caught or nothing runs; else under a condition.
When = Literal["always", "sometimes", "guarded"]
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True)
class ImportStatement:
    """One module that a file imports.

    Attributes:
        module: The module's name; empty for `from . import name`.
        names: The names imported from it; empty for `import module`.
        level: How many packages up a relative import starts; 0 if it is absolute.
    """

    source: str
    line: int
    module: str
    names: tuple[str, ...]
    level: int
    when: When


@lru_cache(maxsize=1024)  # the variants of a project have the same files
def of_source(source: Source) -> tuple[ImportStatement, ...]:
    """Return the imports of a file, in no particular order."""
    return tuple(_in(source.name, source.tree.body, "always")) if source.tree else ()


def executed_files(sources: Iterable[Source], own: str) -> frozenset[str]:
    """Return the files that are executed whenever the package is loaded.

    Args:
        own: The package's own name, by which a file may import the others.
    """
    imports = {source.name: of_source(source) for source in sources}
    reached: set[str] = set()
    waiting = ["__init__.py"]
    while waiting:
        name = waiting.pop()
        if name not in imports or name in reached:
            continue
        reached.add(name)
        for statement in imports[name]:
            if statement.when == "always":
                waiting += _files(statement, own)
    return frozenset(reached)


def _files(statement: ImportStatement, own: str) -> Iterator[str]:
    """Yield the files of the package that an import may execute."""
    parts = statement.module.split(".") if statement.module else []
    if statement.level:
        parts = [*statement.source.split("/")[: -statement.level], *parts]
    elif parts[0] == own:
        parts = parts[1:]
    else:
        return
    for length in range(len(parts) + 1):
        yield "/".join([*parts[:length], "__init__.py"])
    for module in ([*parts], *([*parts, name] for name in statement.names)):
        yield "/".join(module) + ".py"
        yield "/".join([*module, "__init__.py"])


def _in(source: str, nodes: Sequence[ast.AST], when: When) -> Iterator[ImportStatement]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield ImportStatement(source, node.lineno, alias.name, (), 0, when)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield ImportStatement(source, node.lineno, node.module or "", names, node.level, when)
        elif isinstance(node, ast.Try):
            yield from _in_try(source, node, when)
        elif isinstance(node, ast.If):
            checks_types = any(getattr(n, "attr", getattr(n, "id", "")) == "TYPE_CHECKING" for n in ast.walk(node.test))
            yield from _in(source, node.body, "guarded" if checks_types else _at_most("sometimes", when))
            yield from _in(source, node.orelse, _at_most("sometimes", when))
        else:
            in_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            inner = [child for field in _BODIES for child in getattr(node, field, ())]
            yield from _in(source, inner, _at_most("sometimes", when) if in_function else when)


def _in_try(source: str, node: ast.Try, when: When) -> Iterator[ImportStatement]:
    # A handler that raises again reports the absence in other words.
    guards = any(
        catches_absence(handler) and not any(isinstance(part, ast.Raise) for part in handler.body)
        for handler in node.handlers
    )
    yield from _in(source, node.body, "guarded" if guards else when)
    for handler in node.handlers:
        yield from _in(source, handler.body, _at_most("sometimes", when))
    yield from _in(source, node.orelse, _at_most("sometimes", when) if guards else when)
    yield from _in(source, node.finalbody, when)


def _at_most(limit: When, when: When) -> When:
    return "guarded" if when == "guarded" else limit
