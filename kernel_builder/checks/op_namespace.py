"""Are operators registered from Python under the kernel's own namespace?

Two versions of a kernel can be loaded in one process because each has operators of its own; Torch refuses to register a
name twice.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from kernel_builder.checks.findings import Finding, Package

NAME = "op-namespace"


def check(package: Package) -> Iterator[Finding]:
    for source in package.sources:
        for line, called, fixed in _registrations(source.tree):
            yield Finding(
                NAME,
                source.name,
                f"line {line}: {called} with the fixed name {fixed!r}: two versions of the kernel could not be loaded "
                "in one process",
                f'use `add_op_namespace_prefix("{fixed.partition("::")[2] or "name"}")` from `._ops`',
            )


def _registrations(tree: ast.Module | None) -> Iterator[tuple[int, str, str]]:
    """Line, function and name of every call of `torch.library` with a namespace that is written out."""
    aliases = _aliases(tree) if tree else {}
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, ast.Call) or not (called := _dotted(node.func, aliases)).startswith("torch.library."):
            continue
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        fixed = texts[:1] if called == "torch.library.Library" else [t for t in texts if re.match(r"\w+::\w", t)]
        if fixed:
            yield node.lineno, called, fixed[0]


def _aliases(tree: ast.Module) -> Mapping[str, str]:
    """What the names that a module imports stand for, e.g. `tl` -> `torch.library`."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                aliases[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return aliases


def _dotted(node: ast.expr, aliases: Mapping[str, str]) -> str:
    """`tl.define` as `torch.library.define` where `tl` was imported so; empty for what is not a dotted name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute) and (parent := _dotted(node.value, aliases)):
        return f"{parent}.{node.attr}"
    return ""
