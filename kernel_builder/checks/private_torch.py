"""Check that the package's Python uses no name of Torch that begins with an underscore.

Any release of Torch may rename or remove such a name, and then the package may not even import. A finding is a warning,
because the package works on the Torch of today.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kernel_builder.checks.findings import CheckedPackage, Finding
from kernel_builder.checks.python_files import Source

NAME = "private-torch"

# Beginnings of names that Torch documents in spite of the underscore:
# https://docs.pytorch.org/docs/stable/torch.html#utilities and https://docs.pytorch.org/docs/stable/logging.html
_DOCUMENTED = ("torch._assert", "torch._check", "torch._foreach_", "torch._logging")


def check_private_torch(package: CheckedPackage) -> Iterator[Finding]:
    for source in package.sources:
        for line, name in sorted(set(_private_names(source))):
            yield Finding(
                NAME,
                source.name,
                f"line {line}: uses {name}, which any release of Torch may rename or remove",
                "use a name that Torch documents: `torch.library`, `torch.autograd.Function`, `torch.compiler`, ...",
                "warning",
            )


def _private_names(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each use, up to the first part of the name that begins with an underscore."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [source.dotted(node)]
        elif isinstance(node, ast.Call) and _is_getattr(node):
            names = [f"{source.dotted(node.args[0])}.{_text(node.args[1])}"]
        else:
            continue
        for name in names:
            if private := _up_to_private(name):
                yield node.lineno, private


def _up_to_private(name: str) -> str:
    """Return `torch._C` for `torch._C._log`; an empty text for a public name, or one that is not Torch's."""
    parts = name.split(".")
    # `torch.ops.<namespace>.<op>` are named by their registration.
    begin = 1 if parts[:2] != ["torch", "ops"] else 3 if parts[2:3] == ["aten"] else 4
    for index in range(begin, len(parts)):
        if parts[0] == "torch" and parts[index].startswith("_") and not parts[index].endswith("__"):
            private = ".".join(parts[: index + 1])
            return "" if private.startswith(_DOCUMENTED) else private
    return ""


def _is_getattr(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) >= 2


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
