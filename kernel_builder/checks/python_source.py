"""Does the package's Python run on every supported interpreter, import only what is there, and share its process?"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from kernel_builder.checks.model import Finding, Package
from kernel_builder.variant import Release

NAME = "python-source"

# Torch, what Torch's GPU builds bring, and the client that loads the kernel.
_PRESENT = frozenset({"torch", "triton", "kernels"})
_BUILTIN_TYPES = frozenset({"bool", "bytes", "complex", "dict", "float", "int", "list", "set", "str", "tuple", "type"})


def check(package: Package) -> Iterator[Finding]:
    modules = {path.stem for path in package.directory.glob("*.py")}
    modules |= {path.parent.name for path in package.directory.glob("*/__init__.py")}
    for path in sorted(package.directory.rglob("*.py")):
        name = path.relative_to(package.directory).as_posix()
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source, name, feature_version=(*package.policy.python,))
        except (SyntaxError, ValueError) as error:
            line = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
            message = error.msg if isinstance(error, SyntaxError) else str(error)
            yield Finding(NAME, name, f"{line}{message}", _too_old(package.policy.python))
            continue
        guarded = _guarded_lines(tree)
        yield from _versions(name, source, guarded, package.policy.python)
        yield from _unions(name, tree, guarded, package.policy.python)
        yield from _imports(name, tree, guarded, modules, package)
        yield from _namespaces(name, tree)


def _too_old(python: Release) -> str:
    return f"write it so that Python {python} understands it: kernels are loaded by every Python since {python}"


def _guarded_lines(tree: ast.Module) -> frozenset[int]:
    """The lines that are meant not to run everywhere: tried, or under a question for the version of Python."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        bodies: list[ast.stmt] = []
        if isinstance(node, ast.Try) and any(_catches_absence(handler) for handler in node.handlers):
            bodies = node.body
        elif isinstance(node, ast.If) and re.search(r"version_info|TYPE_CHECKING", ast.dump(node.test)):
            bodies = node.body + node.orelse
        for statement in bodies:
            lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return frozenset(lines)


def _catches_absence(handler: ast.ExceptHandler) -> bool:
    caught = re.findall(r"id='(\w+)'", ast.dump(handler.type)) if handler.type else ["Exception"]
    return bool(
        {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}.intersection(caught)
    )


def _versions(name: str, source: str, guarded: frozenset[int], python: Release) -> Iterator[Finding]:
    """Parts of the language and the standard library that came after `python`; what to look for is vermin's data."""
    import vermin

    config = vermin.Config()
    config.set_format(vermin.formats.ParsableFormat())
    visitor = vermin.visit(source, config)
    if not isinstance(visitor, vermin.SourceVisitor):
        return  # vermin could not parse what this interpreter could
    for text in visitor.output_text().splitlines():
        # <file>:<line>:<column>:<Python 2>:<Python 3>:<what>
        match = re.fullmatch(r"<unknown>:(\d+):\d*:[^:]*:(\d+\.\d+):(.*)", text)
        if match and int(match[1]) not in guarded and Release.parse(match[2]) > python:
            # vermin guesses the type whose method is called, and another class may have one of that name.
            guess = re.match(rf"'(?:{'|'.join(sorted(_BUILTIN_TYPES))})\.", match[3])
            yield Finding(
                NAME,
                name,
                f"line {match[1]}: {match[3]} needs Python {match[2]}",
                f"{_too_old(python)}; a line that never runs there may say so with `# novm`",
                "warning" if guess else "error",
            )


def _unions(name: str, tree: ast.Module, guarded: frozenset[int], python: Release) -> Iterator[Finding]:
    """`X | Y` on types, where it is evaluated: Python before 3.10 raises TypeError when the module is imported."""
    if python >= (3, 10):
        return
    annotations = {
        id(part)
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
    inner = {id(operand) for node in unions for operand in (node.left, node.right)}
    for node in unions:
        if id(node) in inner or node.lineno in guarded:
            continue
        if id(node) in annotations:
            if postponed:
                continue
            hint = "add `from __future__ import annotations`, or write typing.Optional or typing.Union"
        elif any(_is_builtin_type(operand) for operand in _operands(node)):
            hint = "write typing.Optional or typing.Union, or a tuple in isinstance"
        else:
            continue
        yield Finding(NAME, name, f"line {node.lineno}: `{ast.unparse(node)}` as a type needs Python 3.10", hint)


def _operands(node: ast.expr) -> list[ast.expr]:
    """What `|` joins, from left to right."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _operands(node.left) + _operands(node.right)
    return [node]


def _is_builtin_type(node: ast.expr) -> bool:
    return (isinstance(node, ast.Constant) and node.value is None) or (
        isinstance(node, ast.Name) and node.id in _BUILTIN_TYPES
    )


def _imports(
    name: str, tree: ast.Module, guarded: frozenset[int], modules: set[str], package: Package
) -> Iterator[Finding]:
    own = _python_name(package)
    allowed = _PRESENT | _dependency_modules(package)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            imported = [node.module]
        else:
            continue
        for module in imported:
            root = module.partition(".")[0]
            if root in allowed or root in sys.stdlib_module_names:
                continue
            if root == own or root in modules:
                yield Finding(
                    NAME,
                    name,
                    f"line {node.lineno}: imports {module} by an absolute name, which is another version's or nobody's",
                    f"import it relatively: `from .{module.removeprefix(f'{own}.')} import ...`",
                )
            elif node.lineno not in guarded:
                yield Finding(
                    NAME, name, f"line {node.lineno}: imports {module}, which no user has to have", _import_hint(root)
                )


def _import_hint(root: str) -> str:
    for dependency, modules in _known_dependencies().items():
        if root in modules:
            return f'add "{dependency}" to `python-depends` in build.toml'
    return "use the standard library and Torch only, or a package that `python-depends` may name: " + ", ".join(
        sorted(_known_dependencies())
    )


def _python_name(package: Package) -> str:
    name = (package.metadata or {}).get("name")
    return name.replace("-", "_") if isinstance(name, str) else ""


def _dependency_modules(package: Package) -> frozenset[str]:
    declared = (package.metadata or {}).get("python-depends")
    names = declared if isinstance(declared, list) else []
    return frozenset(module for name in names for module in _known_dependencies().get(name, ()))


@cache
def _known_dependencies() -> Mapping[str, frozenset[str]]:
    """The packages that the client lets a kernel depend on, with the modules that each brings."""
    spec = importlib.util.find_spec("kernels")
    assert spec is not None and spec.origin is not None
    data = json.loads((Path(spec.origin).parent / "python_depends.json").read_text(encoding="utf-8"))
    tables = [data["general"], *data["backends"].values()]
    return {
        name: frozenset(python["import"] for python in entry["python"] if "import" in python)
        for table in tables
        for name, entry in table.items()
    }


def _namespaces(name: str, tree: ast.Module) -> Iterator[Finding]:
    """Registrations with `torch.library` under a fixed namespace: a second version of the kernel would collide."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update(
                {
                    a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                    for a in node.names
                }
            )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            aliases.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not (called := _dotted(node.func, aliases)).startswith("torch.library."):
            continue
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        fixed = texts[:1] if called == "torch.library.Library" else [t for t in texts if re.match(r"\w+::\w", t)]
        if fixed:
            operator = fixed[0].partition("::")[2] or "name"
            yield Finding(
                NAME,
                name,
                f"line {node.lineno}: {called} with the fixed name {fixed[0]!r}: two versions of the kernel "
                "could not be loaded in one process",
                f'use `add_op_namespace_prefix("{operator}")` from `._ops`',
            )


def _dotted(node: ast.expr, aliases: Mapping[str, str]) -> str:
    """`tl.define` as `torch.library.define` where `tl` was imported so; empty for what is not a dotted name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute) and (parent := _dotted(node.value, aliases)):
        return f"{parent}.{node.attr}"
    return ""
