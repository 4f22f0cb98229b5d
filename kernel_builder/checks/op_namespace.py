"""Check that ops are registered from Python in the kernel's own namespace.

Torch refuses to register a name twice, so two versions of a kernel can only be loaded into one process if each has a
namespace of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from kernel_builder.checks.findings import CheckedPackage, Finding
from kernel_builder.checks.python_files import Source

NAME = "op-namespace"


def check_op_namespace(package: CheckedPackage) -> Iterator[Finding]:
    own = (package.metadata.python_name if package.metadata else None) or ""
    for source in package.sources:
        for number in _own_name(source, own):
            yield Finding(
                NAME,
                source.name,
                f"line {number}: torch.ops.{own} has no ops: the namespace of a package is unique to its build",
                "take `ops` from `._ops`: `from ._ops import ops`",
            )
        for line, called, fixed in _registrations(source):
            yield Finding(
                NAME,
                source.name,
                f"line {line}: {called} with the fixed name {fixed!r}: two versions of the kernel could not be loaded "
                "in one process",
                f'use `add_op_namespace_prefix("{fixed.partition("::")[2] or "name"}")` from `._ops`',
            )


def _own_name(source: Source, python_name: str) -> Iterator[int]:
    """Yield the lines that look for ops under the kernel's own name, where a package does not register any."""
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and source.dotted(node) == f"torch.ops.{python_name}":
            yield node.lineno


def _registrations(source: Source) -> Iterator[tuple[int, str, str]]:
    """Yield line, function and name of every call of `torch.library` with a literal namespace."""
    if "library" not in source.text:
        return
    for node in source.nodes:
        if not isinstance(node, ast.Call) or not (called := source.dotted(node.func)).startswith("torch.library."):
            continue
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        fixed = texts[:1] if called == "torch.library.Library" else [t for t in texts if re.match(r"\w+::\w", t)]
        if fixed:
            yield node.lineno, called, fixed[0]
