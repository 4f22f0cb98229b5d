"""Check that a package imports its own modules relatively, and otherwise only what its users have."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from kernel_builder.checks.findings import CheckedPackage, Finding

NAME = "python-imports"

# Torch, a dependency of its GPU builds, and the client that loads the kernel.
_PRESENT = frozenset({"torch", "triton", "kernels"})


def check_python_imports(package: CheckedPackage) -> Iterator[Finding]:
    own = _python_name(package)
    # Top-level modules and packages.
    modules = {source.name.partition("/")[0].removesuffix(".py") for source in package.sources} | {own}
    allowed = _PRESENT | _dependency_modules(package) | sys.stdlib_module_names
    for source in package.sources:
        for line, module in _absolute_imports(source.tree):
            root = module.partition(".")[0]
            if root in allowed:
                continue
            if root in modules:
                yield Finding(
                    NAME,
                    source.name,
                    f"line {line}: imports {module} by an absolute name, which another version may own",
                    f"import it relatively: `from .{module.removeprefix(f'{own}.')} import ...`",
                )
            elif line not in source.guarded_lines:
                yield Finding(
                    NAME,
                    source.name,
                    f"line {line}: imports {module}, which users need not have installed",
                    _hint(root),
                )


def _absolute_imports(tree: ast.Module | None) -> Iterator[tuple[int, str]]:
    """Yield line and module of every absolute import."""
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def _hint(root: str) -> str:
    for dependency, modules in _known_dependencies().items():
        if root in modules:
            return f'add "{dependency}" to `python-depends` in build.toml'
    return "use the standard library and Torch only, or a package that `python-depends` may name: " + ", ".join(
        sorted(_known_dependencies())
    )


def _python_name(package: CheckedPackage) -> str:
    return (package.metadata.python_name if package.metadata else None) or ""


def _dependency_modules(package: CheckedPackage) -> frozenset[str]:
    names = package.metadata.python_depends if package.metadata else ()
    return frozenset(module for name in names for module in _known_dependencies().get(name, ()))


@cache
def _known_dependencies() -> Mapping[str, frozenset[str]]:
    """Map each package that the client allows as a dependency to the modules that it provides."""
    spec = importlib.util.find_spec("kernels")
    assert spec is not None and spec.origin is not None
    data = json.loads((Path(spec.origin).parent / "python_depends.json").read_text(encoding="utf-8"))
    tables = [data["general"], *data["backends"].values()]
    return {
        name: frozenset(python["import"] for python in entry["python"] if "import" in python)
        for table in tables
        for name, entry in table.items()
    }
