"""Check that ops are registered from Python in the kernel's own namespace.

Torch refuses to register a name twice, so two versions of a kernel can only be loaded into one process if each has a
namespace of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from kernel_builder.checks.findings import CheckedPackage, Finding

NAME = "op-namespace"


def check_op_namespace(package: CheckedPackage) -> Iterator[Finding]:
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
    """Yield line, function and name of every call of `torch.library` with a literal namespace."""
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
    """Map imported names to what they stand for, for example `tl` to `torch.library`."""
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
    """Resolve `tl.define` to `torch.library.define` through the aliases; return "" for other expressions."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute) and (parent := _dotted(node.value, aliases)):
        return f"{parent}.{node.attr}"
    return ""
