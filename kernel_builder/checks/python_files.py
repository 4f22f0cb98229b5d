"""The Python files of a package, parsed once for all checks and for all packages that have them.

Loading a package executes `__init__.py`, and of each executed module the statements outside of functions. An import
there must succeed on every machine. An import in a function, under a condition, in a `try` that catches its absence, or
in a file that no executed import leads to need not succeed.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

# `always` when the module is executed; `guarded` where absence is caught or versions are compared; else `sometimes`.
When = Literal["always", "sometimes", "guarded"]
_ABSENCE = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"})


class Import(NamedTuple):
    """One module that a file imports.

    Attributes:
        module: The module's name; empty for `from . import name`.
        names: The names imported from it; empty for `import module`.
        level: How many packages up a relative import starts; 0 if it is absolute.
    """

    line: int
    module: str
    names: tuple[str, ...]
    level: int
    when: When


@dataclass(frozen=True)
class Source:
    """One Python file.

    Attributes:
        name: Its path in the package, with `/`.
        tree: Its syntax tree; None if it cannot be parsed, for the reason in `problem`.
    """

    name: str
    text: str
    tree: ast.Module | None
    problem: str = ""

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """The nodes of the tree, each after its parent."""
        return tuple(ast.walk(self.tree)) if self.tree else ()

    @cached_property
    def executed(self) -> Mapping[int, When]:
        """When each line of a statement is executed."""
        return dict(_executed(self.tree.body, "always")) if self.tree else {}

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """The imports, in no particular order."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [Import(node.lineno, a.name, (), 0, self.executed[node.lineno]) for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = tuple(alias.name for alias in node.names)
                when = self.executed[node.lineno]
                found.append(Import(node.lineno, node.module or "", names, node.level, when))
        return tuple(found)

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Full names by the names that imports and assignments give them, for example `torch.library` by `tl`.

        Scopes are not distinguished. The name of `ops` from `._ops` is `torch.ops.<id>`.
        """
        aliases: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    aliases[alias.asname or name] = name
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
            elif isinstance(node, ast.ImportFrom) and node.module == "_ops":
                aliases.update({alias.asname or "ops": "torch.ops.<id>" for alias in node.names if alias.name == "ops"})
        for node in self.nodes:
            if isinstance(node, ast.Assign) and (name := _dotted(node.value, aliases)):
                aliases.update({target.id: name for target in node.targets if isinstance(target, ast.Name)})
        return aliases

    def dotted(self, node: ast.expr) -> str:
        """Resolve `tl.define` to `torch.library.define` through the aliases; return "" for other expressions."""
        return _dotted(node, self.aliases)


def read(directory: Path, python: tuple[int, int]) -> tuple[Source, ...]:
    """Parse all Python files under `directory`, sorted, with the grammar of the release `python`."""
    return tuple(
        _parse(path.relative_to(directory).as_posix(), path.read_bytes(), python)
        for path in sorted(directory.rglob("*.py"))
        if path.is_file()  # reading a pipe may never end; the check `layout` reports it
    )


@lru_cache(maxsize=1024)  # the variants of a project have the same files
def _parse(name: str, data: bytes, python: tuple[int, int]) -> Source:
    try:
        text = data.decode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Source(name, text, ast.parse(text, name, feature_version=python))
    except SyntaxError as error:
        return Source(name, text, None, f"line {error.lineno}: {error.msg}")
    except ValueError as error:
        return Source(name, "", None, str(error))
    except (RecursionError, MemoryError):  # the exception depends on the release of Python
        return Source(name, text, None, "an expression is nested too deeply for Python's parser")


def executed_files(sources: Iterable[Source], own: str) -> frozenset[str]:
    """Return the files that are executed whenever the package is loaded.

    Args:
        own: The package's own name, by which a file may import the others.
    """
    by_name = {source.name: source for source in sources}
    reached: set[str] = set()
    waiting = ["__init__.py"]
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in reached:
            reached.add(name)
            for statement in by_name[name].imports:
                if statement.when == "always":
                    waiting += _files(name, statement, own)
    return frozenset(reached)


def _files(source: str, statement: Import, own: str) -> Iterator[str]:
    """Yield the files of the package that an import may execute."""
    parts = statement.module.split(".") if statement.module else []
    if statement.level:
        parts = [*source.split("/")[: -statement.level], *parts]
    elif parts[0] == own:
        parts = parts[1:]
    else:
        return
    for length in range(len(parts) + 1):
        yield "/".join([*parts[:length], "__init__.py"])
    for module in (parts, *([*parts, name] for name in statement.names)):
        yield "/".join(module) + ".py"
        yield "/".join([*module, "__init__.py"])


def _executed(statements: Sequence[ast.stmt], when: When) -> Iterator[tuple[int, When]]:
    """Yield when the lines of statements are executed; the last pair of a line counts."""
    rarely: When = "guarded" if when == "guarded" else "sometimes"
    for statement in statements:
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
            yield line, when
        match statement:
            case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
                yield from _executed(body, rarely)
            case ast.If(test, body, orelse):
                names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(test)}
                guards = not names.isdisjoint({"version_info", "TYPE_CHECKING"})
                yield from _executed([*body, *orelse], "guarded" if guards else rarely)
            case ast.Try(body, handlers, orelse, final):
                guards = any(map(_guards, handlers))
                yield from _executed(body, "guarded" if guards else when)
                yield from _executed([part for handler in handlers for part in handler.body], rarely)
                yield from _executed(orelse, rarely if guards else when)
                yield from _executed(final, when)
            case _:
                for holder in (statement, *getattr(statement, "cases", ())):
                    yield from _executed([*getattr(holder, "body", ()), *getattr(holder, "orelse", ())], when)


def _guards(handler: ast.ExceptHandler) -> bool:
    """Return whether an `except` clause catches absence; one that raises again reports it in another way."""
    catches = handler.type is None or not _ABSENCE.isdisjoint(re.findall(r"id='(\w+)'", ast.dump(handler.type)))
    return catches and not any(isinstance(part, ast.Raise) for part in handler.body)


def _dotted(node: ast.expr, aliases: Mapping[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute) and (parent := _dotted(node.value, aliases)):
        return f"{parent}.{node.attr}"
    return ""
