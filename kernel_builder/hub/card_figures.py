"""The measurements in a kernel's card: `NAME.json` of `kernel-builder benchmark`, and its plot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_builder.config.project import Project
from kernel_builder.config.project_files import in_work_tree

# The directory of the measurements, in a project and in a published repository.
RESULTS = "benchmarks/results"


@dataclass(frozen=True)
class Measurement:
    """One run: its data, its plot, or both, under one name."""

    name: str
    data: Path | None
    plot: Path | None

    @property
    def files(self) -> Mapping[str, Path]:
        """The files by their path in a published repository."""
        return {f"{RESULTS}/{path.name}": path for path in (self.data, self.plot) if path}

    def value(self, key: str) -> str | None:
        """Return a text field of the data, such as `command`, or None."""
        value = self._document.get(key)
        return value if isinstance(value, str) else None

    @property
    def _document(self) -> Mapping[str, Any]:
        try:
            document: Any = json.loads(self.data.read_bytes()) if self.data else None
        except (OSError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}


def find(project: Project) -> tuple[Measurement, ...]:
    """Find the measurements of a project, sorted by name.

    They are in `benchmarks/results` of the project or of the git repository around it. In the latter they are named
    `<project>.<machine>`, and the plot is beside the data or below `docs`.
    """
    measurements: dict[str, Measurement] = {}
    root = Path(os.path.realpath(project.root))
    for directory, pattern in _places(project):
        names = {path.stem for path in directory.glob(f"{RESULTS}/{pattern}") if path.suffix in (".json", ".svg")}
        for name in names - measurements.keys():
            data = directory / RESULTS / f"{name}.json"
            plot = directory / RESULTS / f"{name}.svg"
            if not plot.is_file():
                plot = next(iter(sorted(directory.glob(f"docs/**/{name}.svg"))), plot)
            files = (path if path.is_file() and in_work_tree(root, path) else None for path in (data, plot))
            measurements[name] = Measurement(name, *files)
    return tuple(measurements[name] for name in sorted(measurements))


def _places(project: Project) -> Iterator[tuple[Path, str]]:
    """Yield the directories to search, each with the pattern of file names."""
    yield project.root, "*"
    for parent in [project.root, *project.root.parents]:
        if (parent / ".git").exists():
            if parent != project.root:
                yield parent, f"{project.name}.*"
            return
