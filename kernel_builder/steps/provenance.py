"""The origin of a package: the builder's version, and the commits of builder and sources."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kernel_aot
import kernel_emulator
import kernel_format
import kernel_sandbox
from kernel_builder.checkouts import committed_files, git_output
from kernel_builder.config.project import Project
from kernel_builder.version import VERSION

# The distributions that are parts of the builder.
_LIBRARIES = (kernel_aot, kernel_emulator, kernel_format, kernel_sandbox)


@dataclass(frozen=True)
class GitState:
    """The commit that sources came from, and whether any of them differs from it."""

    commit: str
    dirty: bool


def git_state(directory: Path, files: Iterable[Path]) -> GitState | None:
    """Return the git state of some files, or None without git, a repository or a commit.

    The content of every file is compared with the commit. `git status` is not safe: it runs programs that the
    repository's configuration names (filters, a file system monitor), and trusts the index. A file that the commit
    lacks counts as a difference.
    """
    answer = git_output(directory, "rev-parse", "--show-toplevel", "--verify", "HEAD")
    if answer is None:
        return None
    top, _, commit = os.fsdecode(answer.rstrip(b"\n")).rpartition("\n")
    committed = committed_files(directory, commit)
    if committed is None:
        return GitState(commit, dirty=True)
    inside = {path for path, entry in committed.items() if entry.is_submodule}
    submodules: dict[str, list[Path]] = {}
    dirty = False
    for path in files:
        name = os.path.relpath(path, top)
        entry = committed.get(name)
        if module := next((parent for parent in map(str, Path(name).parents) if parent in inside), None):
            submodules.setdefault(module, []).append(path)
        elif entry is None or not entry.is_file(path):
            dirty = True
    for name, paths in submodules.items():
        dirty = git_state(Path(top, name), paths) != GitState(committed[name].name, dirty=False) or dirty
    return GitState(commit, dirty)


def builder_origin(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the builder's entry in a package's provenance."""
    # The public client expects a version. An editable install reports the version of its installation time, so a
    # checkout records its commit as the version: equal sources give equal bytes.
    version = f"0+g{state['commit'][:12]}" if state else VERSION
    return {"version": version, **state}


def provenance(project: Project, sources: Iterable[str]) -> dict[str, Any]:
    """Return the provenance of a package: the builder and the project's sources."""
    here = Path(__file__).resolve().parents[1]
    packages = [here, *(Path(str(module.__file__)).parent for module in _LIBRARIES)]
    walks = (walk for package in packages for walk in os.walk(package) if "__pycache__" not in walk[0])
    files = (Path(folder, name) for folder, _, names in walks for name in names)
    own = git_state(here, files) if (here.parent / ".git").exists() else None
    recorded: dict[str, Any] = {"kernel-builder": builder_origin(asdict(own) if own else {})}
    inputs = {"build.toml", *(str(path.relative_to(project.root)) for _, path in project.python_files), *sources}
    for part in [project.framework, *project.kernels]:
        inputs.update(getattr(part, "src", ()))
    root = project.root.resolve()
    kernel = git_state(root, sorted({path for name in inputs for path in _git_paths(root / name)}))
    if kernel:
        recorded["kernel"] = asdict(kernel)
    return recorded


def _git_paths(path: Path) -> list[Path]:
    """Return the paths that git tracks for a file: the file itself, and the symbolic links that lead to it."""
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            target = Path(os.path.normpath(part.parent / part.readlink()))
            return [part, *_git_paths(target / path.relative_to(part))]
    return [path]
