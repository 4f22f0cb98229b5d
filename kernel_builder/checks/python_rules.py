"""Checks of a package's Python: the interpreters that it runs on, the modules that it imports, and its op namespace."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path

import vermin

from kernel_builder import toml_file
from kernel_builder.checks.findings import OLDEST_PYTHON, CheckedPackage, Finding
from kernel_builder.checks.python_files import Import, Source, executed_files
from kernel_builder.config.variant import Release

_BUILTIN_TYPE = re.compile(r"'(?:bool|bytes|complex|dict|float|int|list|set|str|tuple|type)\.")


def check_python_source(package: CheckedPackage) -> Iterator[Finding]:
    """Check that the package's Python runs on the oldest supported interpreter."""
    for source in package.sources:
        if source.tree is None:
            hint = f"correct the syntax; Python {OLDEST_PYTHON} must be able to read it"
            yield Finding(source.problem, hint, path=source.name)
        else:
            yield from _versions(source)


@lru_cache(maxsize=1024)  # the variants of a project have the same files
def _versions(source: Source) -> tuple[Finding, ...]:
    """Return the uses of newer parts of the language and of the standard library, by vermin's data."""
    config = vermin.Config()
    config.set_format(vermin.formats.ParsableFormat())
    visitor = vermin.visit(source.text, config)
    if not isinstance(visitor, vermin.SourceVisitor):
        return ()  # vermin could not parse the file, and this interpreter could
    findings = []
    for text in visitor.output_text().splitlines():
        # <file>:<line>:<column>:<Python 2>:<Python 3>:<feature>
        match = re.fullmatch(r"<unknown>:(\d+):\d*:[^:]*:(\d+\.\d+):(.*)", text)
        if match and source.executed.get(int(match[1])) != "guarded" and Release.parse(match[2]) > OLDEST_PYTHON:
            # vermin guesses the type whose method is called; another class may have a method of that name.
            guess = _BUILTIN_TYPE.match(match[3])
            hint = f"write it for Python {OLDEST_PYTHON}, or mark a line that never runs there with `# novm`"
            message = f"line {match[1]}: {match[3]} needs Python {match[2]}"
            findings.append(Finding(message, hint, "warning" if guess else "error", source.name))
    return tuple(findings)


def check_python_imports(package: CheckedPackage) -> Iterator[Finding]:
    """Check that a package imports its own modules relatively, and otherwise only modules that its users have.

    `present_modules.toml` lists the requirements of Torch and of the client; `python-depends` adds to it. An import
    that every load executes must succeed everywhere, so a failure is an error. Any other import is a warning, and an
    import whose absence the code catches is not reported.
    """
    own = _python_name(package)
    # Top-level modules and packages.
    modules = {source.name.partition("/")[0].removesuffix(".py") for source in package.sources} | {own}
    allowed = always_present() | _dependency_modules(package) | sys.stdlib_module_names
    executed = executed_files(package.sources, own)
    for source in package.sources:
        reported: set[tuple[str, bool]] = set()
        for statement in source.imports:
            module, root = statement.module, statement.module.partition(".")[0]
            if statement.level or root in allowed or (root not in modules and statement.when == "guarded"):
                continue
            always = statement.when == "always" and source.name in executed
            if (module, always) not in reported:
                reported.add((module, always))
                yield _import_finding(source.name, statement, is_own=root in modules, always=always)


def _import_finding(source: str, statement: Import, *, is_own: bool, always: bool) -> Finding:
    imports, root = f"line {statement.line}: imports {statement.module}", statement.module.partition(".")[0]
    if is_own:
        message, hint = (
            f"{imports} by an absolute name, which another version may own",
            "import it relatively, `from .`",
        )
    else:
        always = always and root not in _table()["usual"].get(root, ())
        message = f"{imports}, which users need not have installed"
        hint = (
            "import it where it is used, or catch ImportError; use the standard library and Torch only, or a package "
            f"that `python-depends` may name: {', '.join(sorted(_known_dependencies()))}"
        )
        for dependency, modules in _known_dependencies().items():
            if root in modules:
                hint = f'add "{dependency}" to `python-depends` in build.toml'
    return Finding(message, hint, "error" if always else "warning", source)


def imported_roots(package: CheckedPackage) -> frozenset[str]:
    """Return the top-level names of all modules of others that a package imports."""
    statements = (statement for source in package.sources for statement in source.imports if not statement.level)
    return frozenset(statement.module.partition(".")[0] for statement in statements) - {_python_name(package)}


def _python_name(package: CheckedPackage) -> str:
    return (package.metadata.python_name if package.metadata else None) or ""


def _dependency_modules(package: CheckedPackage) -> frozenset[str]:
    names: tuple[str, ...] = package.metadata.python_depends if package.metadata else ()
    if package.is_on_tvm_ffi:
        names = (*names, "tvm-ffi")  # without it, the client does not load the variant
    own = {module for name in names for module in _known_dependencies().get(name, ())}
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


def check_op_namespace(package: CheckedPackage) -> Iterator[Finding]:
    """Check that ops are registered from Python in the kernel's own namespace.

    Torch refuses to register a name twice, so two versions of a kernel can only be loaded into one process if each has
    a namespace of its own.
    """
    own = f"torch.ops.{_python_name(package)}"
    for source in package.sources:
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and source.dotted(node) == own:
                yield Finding(
                    f"line {node.lineno}: {own} has no ops: the namespace of a package is unique to its build",
                    "take `ops` from `._ops`: `from ._ops import ops`",
                    path=source.name,
                )
            elif isinstance(node, ast.Call) and "library" in source.text and (fixed := _fixed_name(source, node)):
                yield Finding(
                    f"line {node.lineno}: {source.dotted(node.func)} with the fixed name {fixed!r}: two versions of "
                    "the kernel could not be loaded in one process",
                    f'use `add_op_namespace_prefix("{fixed.partition("::")[2] or "name"}")` from `._ops`',
                    path=source.name,
                )


def _fixed_name(source: Source, call: ast.Call) -> str | None:
    """Return the literal name with a namespace in a call of `torch.library`; None if there is none."""
    called = source.dotted(call.func)
    if not called.startswith("torch.library."):
        return None
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return next((t for t in texts if called == "torch.library.Library" or re.match(r"\w+::\w", t)), None)
