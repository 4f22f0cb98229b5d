"""The Python files of a package, parsed once for all checks and for all packages that have them."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path


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
    def guarded_lines(self) -> frozenset[int]:
        """The lines that need not run everywhere: in a `try` that catches absence, or under a version check."""
        lines: set[int] = set()
        for node in self.nodes:
            bodies: list[ast.stmt] = []
            if isinstance(node, ast.Try) and any(map(catches_absence, node.handlers)):
                bodies = node.body
            elif isinstance(node, ast.If) and _is_version_check(node.test):
                bodies = node.body + node.orelse
            for statement in bodies:
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
        return frozenset(lines)

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


_ABSENCE = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"})


def catches_absence(handler: ast.ExceptHandler) -> bool:
    """Return whether an `except` clause catches the exception of a module or a name that does not exist."""
    return handler.type is None or not _ABSENCE.isdisjoint(re.findall(r"id='(\w+)'", ast.dump(handler.type)))


def _is_version_check(test: ast.expr) -> bool:
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(test)}
    return not names.isdisjoint({"version_info", "TYPE_CHECKING"})


def _dotted(node: ast.expr, aliases: Mapping[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute) and (parent := _dotted(node.value, aliases)):
        return f"{parent}.{node.attr}"
    return ""
