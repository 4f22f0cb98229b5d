"""Solutions of a definition: `solution.json`, or source files, as a program for another process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from kernel_format.errors import ConfigError
from kernel_tasks.definition_models import CPP_SUFFIXES, DEFINITION, SOLUTION, read_json
from kernel_tasks.task import CANDIDATE, Files

_MODEL = "from kernel_tasks.definition_models import solution_model\n\nModelNew = solution_model(__file__)\n"


def candidate_program(path: Path, definition: Mapping[str, Any]) -> Files:
    """Return the sources of a solution, with the definition, and a `candidate.py` that defines `ModelNew`.

    Args:
        path: A `solution.json`, a directory with one, a source file with `run`, or a directory with one such file.

    Raises:
        ConfigError: If the solution is of another definition, or a source is missing.
    """
    file = path / SOLUTION if (path / SOLUTION).is_file() else path
    spec, sources = _of_json(file, definition) if file.suffix == ".json" else _of_sources(path)
    program = {DEFINITION: json.dumps(definition).encode(), SOLUTION: json.dumps({"spec": spec}).encode()}
    return {**sources, **program, CANDIDATE: _MODEL.encode()}


def _of_json(file: Path, definition: Mapping[str, Any]) -> tuple[dict[str, Any], Files]:
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
    sources: Files = {}
    for entry in solution["sources"]:
        name = _source_name(file, entry)
        sources[name] = entry["content"].encode() if entry.get("content") else _content(file.parent / name)
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


def sources_beside(file: Path) -> dict[str, Path]:
    """Return a solution and its sources without content, by their paths; empty if it has all its sources itself."""
    entries = read_json(file).get("sources") if file.suffix == ".json" else None
    names = [_source_name(file, entry) for entry in entries or () if not entry.get("content")]
    return {SOLUTION: file, **{name: file.parent / name for name in names}} if names else {}


def _source_name(file: Path, entry: Mapping[str, Any]) -> str:
    name = PurePosixPath(entry["path"])
    if name.is_absolute() or ".." in name.parts or str(name) in (CANDIDATE, DEFINITION, SOLUTION):
        raise ConfigError(
            f"is {str(name)!r}; expected a relative path without ..",
            where=f"{file}: sources.path",
            hint=f"the judge writes {CANDIDATE}, {DEFINITION} and {SOLUTION} itself",
        )
    return str(name)


def _of_sources(path: Path) -> tuple[dict[str, Any], Files]:
    """Return the specification of files without a `solution.json`: `run` of one of them is called."""
    known = (".py", *CPP_SUFFIXES, ".h", ".hpp", ".cuh")
    files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.suffix in known]
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
