"""Which sources a measured package was built from, and whether a project has changed since.

Packages record the digests of their compiled sources, and results those of their Python files. Results from before that
have a commit, and git says what has changed since, if the clone has the commit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_builder.build import recorded_sources
from kernel_builder.checkouts import git_output
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.plural import some_of


def changes(directory: Path, variant: str, build: Mapping[str, Any]) -> list[str] | None:
    """Return the files of a project that differ from those that were measured; None if it is unknown.

    Args:
        directory: The project's directory.
        variant: The name of the measured variant.
        build: What the result has of the package: `provenance`, and `python` with the digests of its Python files.
    """
    project = read_project(directory)
    provenance = build.get("provenance") or {}
    if sources := provenance.get("sources"):
        compiled = recorded_sources.compiled_differences(project, Variant.parse(variant), sources)
        return [
            *(difference.removesuffix(" has changed") for difference in compiled),
            *_python_changes(project, build.get("python")),
        ]
    commit = (provenance.get("kernel") or {}).get("commit")
    return _changed_in_git(project.root, commit) if commit else None


def _python_changes(project: Project, recorded: Mapping[str, str] | None) -> list[str]:
    if recorded is None:
        return []
    now = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in project.python_files}
    return [name for name, digest in now.items() if recorded.get(name) != digest]


def _changed_in_git(root: Path, commit: str) -> list[str] | None:
    """Return the files of a project that differ from a commit, without tests, benchmarks and prose."""
    shared = [os.path.relpath(path.resolve(), root) for path in root.iterdir() if path.is_symlink() and path.is_dir()]
    left_out = [f":(exclude){name}" for name in ("tests", "benchmarks", "*.md")]
    names = git_output(root, "diff", "--name-only", "--no-ext-diff", "-z", commit, "--", ".", *shared, *left_out)
    return None if names is None else [name for name in os.fsdecode(names).split("\0") if name]


def described(directory: Path, variant: str, build: Mapping[str, Any]) -> str:
    """Return sentences that name the commit of a measured package, and what has changed since."""
    kernel = (build.get("provenance") or {}).get("kernel") or {}
    commit = f"Commit `{kernel['commit'][:12]}`" if kernel.get("commit") else "No commit is recorded"
    # Older results have no digests of Python files.
    sources = "sources" if "python" in build or "sources" not in (build.get("provenance") or {}) else "compiled sources"
    uncommitted = ", with changes that were not committed" if kernel.get("dirty") else ""
    changed = changes(directory, variant, build)
    if changed is None:
        since = "The sources are not recorded, so whether they have changed since is unknown."
    elif changed:
        since = f"**The {sources} have changed since**: {some_of(changed, 3)}."
    else:
        since = f"The {sources} have not changed since."
    return f"{commit}{uncommitted}. {since}"
