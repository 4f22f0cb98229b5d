"""Reads the schemas of a package's operators from its files, without running code.

In a binary, schemas are string constants, because Torch parses them at run time. In Python, they are arguments of
`torch.library` calls: the schema itself, or the annotated function from which Torch infers it. Schemas that Torch
infers from C++ functions are not stored in any file and are not found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kernel_builder import elf

_SCHEMA = re.compile(r"(?:\w+::)?(?P<name>[A-Za-z_]\w*(?:\.\w+)?)\((?P<parameters>.*)\) -> (?:\(.*\)|[A-Za-z]\S*)")
_FROM_FUNCTIONS = ("custom_op", "triton_op")


def read(package: Path) -> Mapping[str, str]:
    """Return the schemas of a package's operators, by name. The namespace is omitted: it differs in every build."""
    schemas: dict[str, str] = {}
    for binary in sorted(package.rglob("*.so")):
        schemas.update(_in_binary(binary))
    for module in sorted(package.rglob("*.py")):
        schemas.update(_in_python(module))
    return schemas


def _named(text: str) -> Iterator[tuple[str, str]]:
    text = " ".join(text.split())
    if match := _SCHEMA.fullmatch(text):
        yield match["name"], text[match.start("name") :]


def _in_binary(binary: Path) -> Iterator[tuple[str, str]]:
    try:
        constants = elf.constants(binary)
    except elf.Unreadable:
        return
    for data in constants:
        for arrow in re.finditer(rb"\) -> ", data):
            start, end = data.rfind(b"\0", 0, arrow.start()) + 1, data.find(b"\0", arrow.end())
            yield from _named(data[start : end if end >= 0 else len(data)].decode("utf-8", "replace"))


def _in_python(module: Path) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(module.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    decorated = {
        call: function
        for function in functions.values()
        for call in function.decorator_list
        if isinstance(call, ast.Call)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called == "define":
            yield from _defined(node)
        elif called in _FROM_FUNCTIONS:
            given = node.args[1] if len(node.args) > 1 else None
            function = functions.get(given.id) if isinstance(given, ast.Name) else decorated.get(node)
            yield from _inferred(node, function)


def _defined(call: ast.Call) -> Iterator[tuple[str, str]]:
    """Parse `library.define("name(…) -> …")` or `torch.library.define("namespace::name", "(…) -> …")`."""
    texts = [_literal(argument) for argument in call.args]
    if len(texts) > 1 and texts[1].startswith("("):
        yield from _named(_without_namespace(texts[0]) + texts[1])
    elif texts:
        yield from _named(_without_namespace(texts[0]))


def _inferred(call: ast.Call, function: ast.FunctionDef | None) -> Iterator[tuple[str, str]]:
    """Parse `custom_op("namespace::name", mutates_args=…)` of a function, or with an explicit schema."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    name = _without_namespace(_literal(call.args[0])) if call.args else ""
    name = name or (function.name if function else "")
    if schema := _literal(given.get("schema")):
        yield from _named(name + schema)
    elif function:
        returns = ast.unparse(function.returns) if function.returns else "()"
        yield name, f"{name}({ast.unparse(function.args)}) -> {returns}{_mutated(given.get('mutates_args'))}"


def _mutated(mutates_args: ast.expr | None) -> str:
    """Describe the arguments that an operator writes to; an empty text for every way to write "none"."""
    text = ast.unparse(mutates_args) if mutates_args else ""
    return "" if text in ("", "()", "[]", "{}", "set()") else f", writes to {text}"


def _literal(node: ast.expr | None) -> str:
    """Return the last string constant of an expression: `f"{namespace}::name"`, `prefixed("name")`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    parts = [_literal(part) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)] if node else []
    return next((part for part in reversed(parts) if part), "")


def _without_namespace(text: str) -> str:
    name, opening, rest = text.partition("(")
    return name.rpartition("::")[2] + opening + rest
