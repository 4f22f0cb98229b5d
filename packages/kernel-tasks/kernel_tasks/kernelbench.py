"""KernelBench: a problem file, and optionally a `task.toml` beside it.

A problem file defines `Model`, `get_inputs` and `get_init_inputs`. The integers that it assigns at its top level are
its sizes; the judge runs the file with other values of them, for shapes that a candidate has not seen.
"""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_format.errors import ConfigError
from kernel_tasks.task import PROBLEM, Files, Problem, Sizes, Task, TaskSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT = "KernelBench: a Python file with Model, get_inputs and get_init_inputs, or a directory with one"
_DTYPES = ("float32", "float16", "bfloat16")
_NEEDED = ("Model", "get_inputs", "get_init_inputs")


@dataclass
class KernelBenchTask(Task):
    """A problem file, whose sizes are free."""

    form: str = (
        "`ModelNew` takes the arguments of `Model`, has parameters of the same names and shapes, and gives the same "
        "results for the same inputs."
    )

    @property
    def source(self) -> str:
        """Return the content of the problem file."""
        return self.files[self.path.name].decode()

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the file: integers, and tuples of integers, that its top level assigns once."""
        sizes: dict[str, Any] = {}
        seen: set[str] = set()
        for statement in ast.parse(self.source).body:
            if not (name := _target(statement)):
                continue
            assert isinstance(statement, ast.Assign)
            constant = _constant(statement.value)
            if name in seen:
                sizes.pop(name, None)
            elif constant is not None:
                sizes[name] = constant
            seen.add(name)
        return sizes

    def source_with(self, sizes: Sizes) -> str:
        """Return the content of the problem file with other sizes."""
        if not sizes:
            return self.source
        tree = ast.parse(self.source)
        for statement in tree.body:
            name = _target(statement)
            if name in sizes and isinstance(statement, ast.Assign):
                statement.value = ast.parse(repr(sizes[name]), mode="eval").body
        return ast.unparse(tree)

    def model_files(self, sizes: Sizes) -> Files:
        """Return the problem file with these sizes."""
        return {PROBLEM: self.source_with(sizes).encode()}

    def problem(self, sizes: Sizes) -> Problem:
        """Run the problem file with these sizes."""
        module = types.ModuleType(f"problem_{re.sub(r'[^A-Za-z0-9]', '_', self.name)}")
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module
        try:
            exec(compile(self.source_with(sizes), str(self.path), "exec"), vars(module))
        except Exception as error:
            raise ConfigError(f"cannot be run: {type(error).__name__}: {error}", where=str(self.path)) from error
        if missing := [name for name in _NEEDED if not hasattr(module, name)]:
            raise ConfigError(
                f"defines no {missing[0]}; a problem has {', '.join(_NEEDED)}",
                where=str(self.path),
                hint="docs/judge.md shows a problem file",
            )
        return Problem(*(getattr(module, name) for name in _NEEDED))


def recognizes(path: Path) -> bool:
    """Return whether a path is a Python file, or a directory with one that defines `get_inputs`."""
    if not path.is_dir():
        return path.is_file() and path.suffix == ".py"
    return (path / "task.toml").is_file() or any("get_inputs" in _text(file) for file in path.glob("*.py"))


def read(path: Path) -> Task:
    """Read a problem file, or a directory with `task.toml` and one problem file."""
    if path.is_dir():
        file, settings = _problem_file(path), path / "task.toml"
    else:
        file, settings = path, path.with_suffix(".toml")
    try:
        source = file.read_text(encoding="utf-8")
        ast.parse(source)
    except (SyntaxError, ValueError, OSError) as error:
        raise ConfigError(f"is not a Python file: {error}", where=str(file)) from error
    text = settings.read_text(encoding="utf-8") if settings.is_file() else ""
    task = KernelBenchTask(
        name=path.stem if path.is_file() else path.resolve().name,
        path=file,
        files={file.name: source.encode(), **({settings.name: text.encode()} if text else {})},
        settings=_settings(text, settings),
        entry="" if path.is_dir() else file.name,
    )
    own = task.sizes()
    for sizes in (task.settings.sizes, *task.settings.shapes):
        for name in sizes:
            if name not in own:
                raise ConfigError(
                    f"{name!r} is not a size of {file.name}; expected one of {', '.join(own) or 'none'}",
                    where=str(settings),
                    hint="a size is an integer that the top level of the problem file assigns",
                )
    return task


def _problem_file(directory: Path) -> Path:
    files = [path for path in sorted(directory.glob("*.py")) if "get_inputs" in _text(path)]
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise ConfigError(
            f"has {len(files)} files that define get_inputs ({names}); expected one",
            where=str(directory),
            hint="name the problem file itself",
        )
    return files[0]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _settings(text: str, path: Path) -> TaskSettings:
    try:
        values = tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"is not TOML: {error}", where=str(path), hint="correct the line that is named") from error
    for key, value in values.items():
        if key not in _KEYS:
            raise ConfigError(f"unknown key; expected one of {', '.join(_KEYS)}", where=f"{path}: {key}")
        expected, is_valid = _KEYS[key]
        if not is_valid(value):
            raise ConfigError(
                f"expected {expected}, got {value!r}", where=f"{path}: {key}", hint="docs/judge.md lists the keys"
            )
    return TaskSettings(**{key: _with_tuples(value) for key, value in values.items()})


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(type(size) is int and size >= 0 for item in value.values() for size in _each(item))


def _each(size: Any) -> list[Any]:
    return size if isinstance(size, list) else [size]


_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "dtypes": (
        f"an array with names from {', '.join(_DTYPES)}",
        lambda value: isinstance(value, list) and bool(value) and all(name in _DTYPES for name in value),
    ),
    "sizes": ("a table of integers of at least 0", _are_sizes),
    "shapes": (
        "an array of tables of integers of at least 0",
        lambda value: _each(value) == value and all(map(_are_sizes, value)),
    ),
    "tolerance": ("a number above 0 and at most 0.1", lambda value: isinstance(value, float) and 0 < value <= 0.1),
    "backward": ("true or false", lambda value: isinstance(value, bool)),
    "device": ('"cpu" or "cuda"', lambda value: value in ("cpu", "cuda")),
}


def _target(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return ""


def _constant(value: ast.expr) -> Any:
    """Return an integer or a tuple of integers that an expression without names gives, else None."""
    if any(isinstance(node, (ast.Name, ast.Call, ast.Lambda)) for node in ast.walk(value)):
        return None
    try:
        constant = eval(compile(ast.Expression(value), "size", "eval"), {"__builtins__": {}})
    except Exception:
        return None
    if isinstance(constant, tuple) and constant and all(type(item) is int for item in constant):
        return constant
    return constant if type(constant) is int else None
