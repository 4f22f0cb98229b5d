"""The Python files of a package, parsed once for all checks."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from functools import cached_property
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
    def guarded_lines(self) -> frozenset[int]:
        """The lines that need not run everywhere: in a `try` that catches absence, or under a version check."""
        lines: set[int] = set()
        for node in ast.walk(self.tree) if self.tree else ():
            bodies: list[ast.stmt] = []
            if isinstance(node, ast.Try) and any(_catches_absence(handler) for handler in node.handlers):
                bodies = node.body
            elif isinstance(node, ast.If) and re.search(r"version_info|TYPE_CHECKING", ast.dump(node.test)):
                bodies = node.body + node.orelse
            for statement in bodies:
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
        return frozenset(lines)


def read(directory: Path, python: tuple[int, int]) -> tuple[Source, ...]:
    """Parse all Python files under `directory`, sorted, with the grammar of the release `python`."""
    return tuple(
        _parse(path.relative_to(directory).as_posix(), path.read_bytes(), python)
        for path in sorted(directory.rglob("*.py"))
    )


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


_ABSENCE = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"})


def _catches_absence(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or not _ABSENCE.isdisjoint(re.findall(r"id='(\w+)'", ast.dump(handler.type)))
