"""Solutions of a definition: `solution.json`, or source files, as a program for another process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from kernel_format.errors import ConfigError
from kernel_format.untrusted_paths import checked_tree
from kernel_tasks.definition_models import CPP_SUFFIXES, DEFINITION, SOLUTION, read_json
from kernel_tasks.task import CANDIDATE, Files

_MODEL = "from kernel_tasks.definition_models import solution_model\n\nModelNew = solution_model(__file__)\n"
_SUFFIXES = (".py", *CPP_SUFFIXES, ".h", ".hpp", ".cuh")


def candidate_program(path: Path, definition: Mapping[str, Any]) -> Files:
    """Return the sources of a solution, with the definition, and a `candidate.py` that defines `ModelNew`.

    Args:
        path: A `solution.json`, a directory with one, a source file with `run`, or a directory with one such file.

    Raises:
        ConfigError: If the solution is of another definition, or a source is missing.
    """
    is_json = path.suffix == ".json" or (path / SOLUTION).is_file()
    spec, sources = _of_json(path, definition) if is_json else _of_sources(path)
    program = {DEFINITION: json.dumps(definition).encode(), SOLUTION: json.dumps({"spec": spec}).encode()}
    return {**sources, **program, CANDIDATE: _MODEL.encode()}


def _of_json(path: Path, definition: Mapping[str, Any]) -> tuple[dict[str, Any], Files]:
    file = path / SOLUTION if path.is_dir() else path
    solution = read_json(file)
    for key, expected in (("definition", str), ("spec", dict), ("sources", list)):
        if not isinstance(solution.get(key), expected):
            raise ConfigError(f"expected a {expected.__name__}", where=f"{file}: {key}", hint="see the schema")
    if solution["definition"] != definition["name"]:
        raise ConfigError(
            f"is {solution['definition']!r}; the task is {definition['name']!r}",
            where=f"{file}: definition",
            hint=f"judge it with --task of {solution['definition']!r}; or correct this key, if it solves the task",
        )
    sources = _sources(file, solution["sources"], file.parent if file != path else None)
    spec = dict(solution["spec"])
    if "::" not in str(spec.get("entry_point")) and len(sources) == 1:  # the form of 2025
        spec["entry_point"] = f"{next(iter(sources))}::{spec.get('entry_point')}"
    if str(spec.get("entry_point")).partition("::")[0] not in sources:
        raise ConfigError(
            f"is {spec.get('entry_point')!r}; expected FILE::FUNCTION with a file of the sources",
            where=f"{file}: spec.entry_point",
            hint=f"the sources are {', '.join(sources)}",
        )
    return spec, sources


def _sources(file: Path, entries: Sequence[Any], directory: Path | None) -> Files:
    """Return the sources of a `solution.json`; those without content lie in the directory, if the user has named it.

    Beside a file that is named alone, the user may have private files, which the solution's author must not read.
    """
    where = f"{file}: sources"
    try:
        checked_tree([*(entry["path"] for entry in entries), CANDIDATE, DEFINITION, SOLUTION])
        sources = {entry["path"]: (entry.get("content") or "").encode() for entry in entries}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        hint = f"each has a path and a text; the judge writes {CANDIDATE}, {DEFINITION} and {SOLUTION} itself"
        raise ConfigError(f"cannot be read: {error}", where=where, hint=hint) from error
    for name in (name for name, content in sources.items() if not content):
        if directory is None or PurePosixPath(name).suffix not in _SUFFIXES:
            hint = f"add it; or name the directory, of which files with {' '.join(_SUFFIXES)} are read"
            raise ConfigError(f"{name} has no content", where=where, hint=hint)
        sources[name] = _content(directory / name)
    return sources


def _of_sources(path: Path) -> tuple[dict[str, Any], Files]:
    """Return the specification of files without a `solution.json`: `run` of one of them is called."""
    files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.suffix in _SUFFIXES]
    root = path.parent if path.is_file() else path
    # A single file may be called candidate.py, as the program's own.
    sources = {
        f"solution{path.suffix}" if path.is_file() else str(file.relative_to(root)): _content(file) for file in files
    }
    entries = [name for name, text in sources.items() if b"def run(" in text or b"void run(" in text]
    if len(entries) != 1:
        raise ConfigError(
            f"has {len(entries)} files that define run; expected one",
            where=str(path),
            hint=f"name the file, or write a {SOLUTION} with spec.entry_point",
        )
    return {"entry_point": f"{entries[0]}::run", "binding": "torch"}, sources


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=str(file), hint="a source has content, or is a file beside it"
        ) from error
