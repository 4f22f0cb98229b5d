"""Check that a package imports its own modules relatively, and otherwise only modules that its users have.

`present_modules.toml` lists the requirements of Torch and of the client; `python-depends` adds to it. An import that
every load executes must succeed everywhere, so a failure is an error. Any other import is a warning, and an import
whose absence the code catches is not reported.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from kernel_builder import toml_file
from kernel_builder.checks.findings import CheckedPackage, Finding
from kernel_builder.checks.import_statements import ImportStatement, executed_files, of_source

NAME = "python-imports"


def check_python_imports(package: CheckedPackage) -> Iterator[Finding]:
    own = _python_name(package)
    # Top-level modules and packages.
    modules = {source.name.partition("/")[0].removesuffix(".py") for source in package.sources} | {own}
    allowed = always_present() | _dependency_modules(package) | sys.stdlib_module_names
    executed = executed_files(package.sources, own)
    for source in package.sources:
        reported: set[tuple[str, bool]] = set()
        for statement in of_source(source):
            module, root = statement.module, statement.module.partition(".")[0]
            if statement.level or root in allowed or (root not in modules and statement.when == "guarded"):
                continue
            always = statement.when == "always" and source.name in executed
            if (module, always) not in reported:
                reported.add((module, always))
                yield _finding(source.name, statement, is_own=root in modules, always=always)


def _finding(source: str, statement: ImportStatement, *, is_own: bool, always: bool) -> Finding:
    where, module = f"line {statement.line}", statement.module
    if is_own:
        message = f"{where}: imports {module} by an absolute name, which another version may own"
        return Finding(NAME, source, message, "import it relatively, `from .`", "error" if always else "warning")
    root = module.partition(".")[0]
    usual = root in _table()["usual"].get(root, ())
    message = f"{where}: imports {module}, which users need not have installed"
    severity: Literal["error", "warning"] = "error" if always and not usual else "warning"
    return Finding(NAME, source, message, _hint(root), severity)


def _hint(root: str) -> str:
    for dependency, modules in known_dependencies().items():
        if root in modules:
            return f'add "{dependency}" to `python-depends` in build.toml'
    return (
        "import it where it is used, or catch ImportError; use the standard library and Torch only, or a package that "
        f"`python-depends` may name: {', '.join(sorted(known_dependencies()))}"
    )


def imported_roots(package: CheckedPackage) -> frozenset[str]:
    """Return the top-level names of all modules of others that a package imports."""
    statements = (statement for source in package.sources for statement in of_source(source) if not statement.level)
    return frozenset(statement.module.partition(".")[0] for statement in statements) - {_python_name(package)}


def _python_name(package: CheckedPackage) -> str:
    return (package.metadata.python_name if package.metadata else None) or ""


def _dependency_modules(package: CheckedPackage) -> frozenset[str]:
    names: tuple[str, ...] = package.metadata.python_depends if package.metadata else ()
    if package.is_on_tvm_ffi:
        names = (*names, "tvm-ffi")  # without it, the client does not load the variant
    own = {module for name in names for module in known_dependencies().get(name, ())}
    return frozenset(own.union(*(_table()["dependency"].get(name, ()) for name in names)))


@cache
def _table() -> Mapping[str, Mapping[str, list[str]]]:
    return toml_file.read(Path(__file__).with_name("present_modules.toml"))


@cache
def always_present() -> frozenset[str]:
    """Return the modules that Torch, its GPU builds and the client bring."""
    tables = (_table()[name] for name in ("torch", "client", "gpu"))
    return frozenset(module for table in tables for modules in table.values() for module in modules)


@cache
def known_dependencies() -> Mapping[str, frozenset[str]]:
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
