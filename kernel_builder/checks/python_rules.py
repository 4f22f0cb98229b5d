"""Checks of a package's Python: the interpreters that it runs on, the modules that it imports, and its op namespace.

Loading a package executes `__init__.py`, and of each executed module the statements outside of functions. An import
there must succeed on every machine. An import in a function, under a condition, in a `try` that catches its absence, or
in a file that no executed import leads to need not succeed.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import re
import sys
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import vermin

from kernel_builder import toml_file
from kernel_builder.checks.findings import OLDEST_PYTHON, CheckedPackage, Finding
from kernel_builder.config.variant import Release

# `always` when the module is executed; `guarded` where absence is caught or versions are compared; else `sometimes`.
When = Literal["always", "sometimes", "guarded"]
_ABSENCE = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"})


class Import(NamedTuple):
    """One module that a file imports.

    Attributes:
        module: The module's name; empty for `from . import name`.
        names: The names imported from it; empty for `import module`.
        level: How many packages up a relative import starts; 0 if it is absolute.
    """

    line: int
    module: str
    names: tuple[str, ...]
    level: int
    when: When


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
    def nodes(self) -> tuple[ast.AST, ...]:
        """The nodes of the tree, each after its parent."""
        return tuple(ast.walk(self.tree)) if self.tree else ()

    @cached_property
    def executed(self) -> Mapping[int, When]:
        """When each line of a statement is executed."""
        changes = dict(_executed(self.tree.body, "always")) if self.tree else {}
        lines: dict[int, When] = {}
        when: When = "always"
        for line in range(1, max(changes, default=1)):
            lines[line] = when = changes.get(line, when)
        return lines

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """The imports, in no particular order."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [Import(node.lineno, a.name, (), 0, self.executed[node.lineno]) for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = tuple(alias.name for alias in node.names)
                when = self.executed[node.lineno]
                found.append(Import(node.lineno, node.module or "", names, node.level, when))
        return tuple(found)

    @cached_property
    def aliases(self) -> Mapping[str, str]:
        """Full names by the names that imports and assignments give them, for example `torch.library` by `tl`.

        Scopes are not distinguished. The name of `ops` from `._ops` is `torch.ops.<id>`.
        """
        aliases: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    aliases[alias.asname or name] = name
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
            elif isinstance(node, ast.ImportFrom) and node.module == "_ops":
                aliases.update({alias.asname or "ops": "torch.ops.<id>" for alias in node.names if alias.name == "ops"})
        for node in self.nodes:
            if isinstance(node, ast.Assign) and (name := _dotted(node.value, aliases)):
                aliases.update({target.id: name for target in node.targets if isinstance(target, ast.Name)})
        return aliases

    def dotted(self, node: ast.expr) -> str:
        """Resolve `tl.define` to `torch.library.define` through the aliases; return "" for other expressions."""
        return _dotted(node, self.aliases)


def sources_of(package: CheckedPackage) -> tuple[Source, ...]:
    """Parse all Python files of a package, sorted, with the grammar of the oldest Python."""
    directory = package.directory
    return tuple(
        _parse(path.relative_to(directory).as_posix(), path.read_bytes())
        for path in sorted(directory.rglob("*.py"))
        if path.is_file()  # reading a pipe may never end; the check `layout` reports it
    )


@lru_cache(maxsize=1024)  # the variants of a project have the same files
def _parse(name: str, data: bytes) -> Source:
    try:
        text = data.decode()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        if not encoding.startswith("utf-8"):
            return Source(
                name, text, None, f"Python reads it as {encoding}, readers as UTF-8: remove the encoding line"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Source(name, text, ast.parse(text, name, feature_version=OLDEST_PYTHON))
    except SyntaxError as error:
        return Source(name, text, None, f"line {error.lineno}: {error.msg}")
    except ValueError as error:
        return Source(name, "", None, str(error))
    except (RecursionError, MemoryError):  # the exception depends on the release of Python
        return Source(name, text, None, "an expression is nested too deeply for Python's parser")


def executed_files(sources: Iterable[Source], own: str) -> frozenset[str]:
    """Return the files that are executed whenever the package is loaded.

    Args:
        own: The package's own name, by which a file may import the others.
    """
    by_name = {source.name: source for source in sources}
    reached: set[str] = set()
    waiting = ["__init__.py"]
    while waiting:
        name = waiting.pop()
        if name in by_name and name not in reached:
            reached.add(name)
            for statement in by_name[name].imports:
                if statement.when == "always":
                    waiting += _files(name, statement, own)
    return frozenset(reached)


def _files(source: str, statement: Import, own: str) -> Iterator[str]:
    """Yield the files of the package that an import may execute."""
    parts = statement.module.split(".") if statement.module else []
    if statement.level:
        parts = [*source.split("/")[: -statement.level], *parts]
    elif parts[0] == own:
        parts = parts[1:]
    else:
        return
    for length in range(len(parts) + 1):
        yield "/".join([*parts[:length], "__init__.py"])
    for module in (parts, *([*parts, name] for name in statement.names)):
        yield "/".join(module) + ".py"
        yield "/".join([*module, "__init__.py"])


def _executed(statements: Sequence[ast.stmt], when: When) -> Iterator[tuple[int, When]]:
    """Yield the lines from which on code is executed in another way; the last pair of a line counts."""
    rarely: When = "guarded" if when == "guarded" else "sometimes"
    for statement in statements:
        yield statement.lineno, when
        match statement:
            case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
                yield from _executed(body, rarely)
            case ast.If(test, body, orelse):
                names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(test)}
                guards = not names.isdisjoint({"version_info", "TYPE_CHECKING"})
                yield from _executed([*body, *orelse], "guarded" if guards else rarely)
            case ast.Try(body, handlers, orelse, final):
                guards = any(map(_guards, handlers))
                yield from _executed(body, "guarded" if guards else when)
                yield from _executed([part for handler in handlers for part in handler.body], rarely)
                yield from _executed(orelse, rarely if guards else when)
                yield from _executed(final, when)
            case _:
                for holder in (statement, *getattr(statement, "cases", ())):
                    yield from _executed([*getattr(holder, "body", ()), *getattr(holder, "orelse", ())], when)
        yield (statement.end_lineno or statement.lineno) + 1, when


def _guards(handler: ast.ExceptHandler) -> bool:
    """Return whether an `except` clause catches absence; one that raises again reports it in another way."""
    catches = handler.type is None or not _ABSENCE.isdisjoint(re.findall(r"id='(\w+)'", ast.dump(handler.type)))
    return catches and not any(isinstance(part, ast.Raise) for part in handler.body)


def _dotted(node: ast.expr, aliases: Mapping[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute) and (parent := _dotted(node.value, aliases)):
        return f"{parent}.{node.attr}"
    return ""


_TABLE: Mapping[str, Mapping[str, list[str]]] = toml_file.read(Path(__file__).with_name("present_modules.toml"))
_BUILTIN_TYPE = re.compile(r"'(?:bool|bytes|complex|dict|float|int|list|set|str|tuple|type)\.")


def check_python_source(package: CheckedPackage) -> Iterator[Finding]:
    """Check that the package's Python runs on the oldest supported interpreter."""
    for source in sources_of(package):
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
    own, sources = _python_name(package), sources_of(package)
    # Top-level modules and packages.
    modules = {source.name.partition("/")[0].removesuffix(".py") for source in sources} | {own}
    allowed = always_present() | _dependency_modules(package) | sys.stdlib_module_names | {"compression", "tomllib"}
    executed = executed_files(sources, own)
    for source in sources:
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
        always = always and root not in _TABLE["usual"].get(root, ())
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
    statements = (statement for source in sources_of(package) for statement in source.imports if not statement.level)
    return frozenset(statement.module.partition(".")[0] for statement in statements) - {_python_name(package)}


def _python_name(package: CheckedPackage) -> str:
    return (package.metadata.python_name if package.metadata else None) or ""


def _dependency_modules(package: CheckedPackage) -> frozenset[str]:
    names: tuple[str, ...] = package.metadata.python_depends if package.metadata else ()
    if package.is_on_tvm_ffi:
        names = (*names, "tvm-ffi")  # without it, the client does not load the variant
    own = {module for name in names for module in _known_dependencies().get(name, ())}
    return frozenset(own.union(*(_TABLE["dependency"].get(name, ()) for name in names)))


@cache
def always_present() -> frozenset[str]:
    """Return the modules that Torch, its GPU builds and the client bring."""
    tables = (_TABLE[name] for name in ("torch", "client", "gpu"))
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
    for source in sources_of(package):
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
