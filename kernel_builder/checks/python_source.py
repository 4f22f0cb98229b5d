"""Check that the package's Python runs on the oldest supported interpreter."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import vermin
from vermin import rules

from kernel_builder.checks.findings import CheckedPackage, Finding
from kernel_builder.checks.python_files import Source
from kernel_builder.config.variant import Release

NAME = "python-source"

_BUILTIN_TYPES = frozenset({"bool", "bytes", "complex", "dict", "float", "int", "list", "set", "str", "tuple", "type"})


def check_python_source(package: CheckedPackage) -> Iterator[Finding]:
    python = package.policy.python
    for source in package.sources:
        if source.tree is None:
            advice = (
                _too_old(python) if source.too_new else f"correct the syntax; Python {python} must be able to read it"
            )
            yield Finding(NAME, source.name, source.problem, advice)
        else:
            yield from _versions(source, python)
            yield from _unions(source, source.tree, python)


def _too_old(python: Release) -> str:
    return f"write it for Python {python}: kernels are loaded by every Python from {python} on"


def _versions(source: Source, python: Release) -> Iterator[Finding]:
    """Report uses of the language and the standard library that are newer than `python`, by vermin's data."""
    if not _may_use_newer(source, python):
        return
    config = vermin.Config()
    config.set_format(vermin.formats.ParsableFormat())
    # Tokenizing a file for its comments `# novm` and `# novermin` takes a third of vermin's time.
    config.set_parse_comments("nov" in source.text)
    visitor = vermin.visit(source.text, config)
    if not isinstance(visitor, vermin.SourceVisitor):
        return  # vermin could not parse the file, and this interpreter could
    for text in visitor.output_text().splitlines():
        # <file>:<line>:<column>:<Python 2>:<Python 3>:<what>
        match = re.fullmatch(r"<unknown>:(\d+):\d*:[^:]*:(\d+\.\d+):(.*)", text)
        if match and int(match[1]) not in source.guarded_lines and Release.parse(match[2]) > python:
            # vermin guesses the type whose method is called; another class may have a method of that name.
            guess = re.match(rf"'(?:{'|'.join(sorted(_BUILTIN_TYPES))})\.", match[3])
            yield Finding(
                NAME,
                source.name,
                f"line {match[1]}: {match[3]} needs Python {match[2]}",
                f"{_too_old(python)}; mark a line that never runs there with `# novm`",
                "warning" if guess else "error",
            )


def _may_use_newer(source: Source, python: Release) -> bool:
    """Return whether a source uses all words of a name that is newer than `python`.

    vermin takes a tenth of a second for a file of a thousand lines. Few files have such words, and fewer have them
    outside of comments and docstrings. The grammar with which they are parsed has refused newer syntax already.
    """
    words = set(re.findall(r"\w+", source.text))
    if (names := [name for name in _newer_names(python) if name <= words]) and source.tree:
        used = set(_used_words(source.tree))
        if any(name <= used for name in names):
            return True
    template = getattr(ast, "TemplateStr", None)  # the grammar of newer interpreters lets these pass
    return template is not None and any(isinstance(node, template) for node in source.nodes)


def _used_words(tree: ast.Module) -> Iterator[str]:
    """Yield the words of which vermin puts names together, and the strings that may be type codes of arrays."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from node.module.split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) == 1:
            yield node.value


@cache
def _newer_names(python: Release) -> tuple[frozenset[str], ...]:
    """Return the words of each module, member and keyword argument that is newer than `python`, by vermin's data."""
    config = vermin.Config()
    names: list[tuple[str, ...]] = [("array", typecode) for typecode in _newer(rules.ARRAY_TYPECODE_REQS, python)]
    for name in [*_newer(rules.MOD_REQS(config), python), *_newer(rules.MOD_MEM_REQS(config), python)]:
        names.append(tuple(name.split(".")))
    for function, keyword in _newer(rules.KWARGS_REQS(config), python):
        names.append((*function.split("."), keyword))
    # A literal has a builtin type without naming it.
    return tuple({frozenset(name[1:] if name[0] in _BUILTIN_TYPES and name[1:] else name) for name in names})


def _newer(table: Mapping[Any, tuple[Any, tuple[int, int] | None]], python: Release) -> list[Any]:
    return [name for name, (_, since) in table.items() if since is not None and since > python]


def _unions(source: Source, tree: ast.Module, python: Release) -> Iterator[Finding]:
    """Report `X | Y` between types where it is evaluated: before Python 3.10, the import raises TypeError."""
    if python >= (3, 10):
        return
    annotations = {
        part
        for node in ast.walk(tree)
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if isinstance(annotation, ast.expr)
        for part in ast.walk(annotation)
    }
    postponed = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(n.name == "annotations" for n in node.names)
        for node in tree.body
    )
    unions = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)]
    inner = {operand for node in unions for operand in (node.left, node.right)}
    for node in unions:
        if node in inner or node.lineno in source.guarded_lines:
            continue
        if node in annotations:
            if postponed:
                continue
            hint = "add `from __future__ import annotations`, or write typing.Optional or typing.Union"
        elif any(_is_builtin_type(operand) for operand in _operands(node)):
            hint = "write typing.Optional or typing.Union, or a tuple in isinstance"
        else:
            continue
        yield Finding(NAME, source.name, f"line {node.lineno}: `{ast.unparse(node)}` as a type needs Python 3.10", hint)


def _operands(node: ast.expr) -> list[ast.expr]:
    """Return the operands of a chain of `|`, from left to right."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _operands(node.left) + _operands(node.right)
    return [node]


def _is_builtin_type(node: ast.expr) -> bool:
    return (isinstance(node, ast.Constant) and node.value is None) or (
        isinstance(node, ast.Name) and node.id in _BUILTIN_TYPES
    )
