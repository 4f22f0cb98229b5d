"""Which sources were measured, and whether they have changed since.

Packages record the digests of their compiled sources, and results those of their Python files. Results from before that
have a commit, and git says what has changed since, if the clone has the commit. measured.toml has the commits and the
sources of results that are of no package.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.checkouts import git_output
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Variant
from kernel_builder.plural import counted, some_of
from kernel_builder.steps import recorded_sources

_HERE = Path(__file__).resolve().parent
RESULTS, MEASURED = _HERE / "results", _HERE / "measured.toml"


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


def since(names: Sequence[str]) -> str:
    """Return sentences that name, for results in measured.toml, the commit and what has changed since.

    Raises:
        KeyError: If measured.toml does not have a result.
    """
    entries = toml_file.read(MEASURED)
    sentences = []
    for name in names:
        commit, sources = _commit(name, entries[name]), entries[name]["sources"]
        places = ", ".join(f"`{source}`" for source in sources)
        listed = git_output(_HERE.parent, "diff", "--name-only", "--no-ext-diff", "-z", commit, "--", *sources)
        if listed is None:
            told = f"this clone does not have that commit, so whether {places} has changed since is unknown"
        elif files := listed.count(b"\0"):
            told = f"**since then, {counted(files, 'file')} of {places} changed**"
        else:
            told = f"{places} has not changed since"
        sentences.append(f"{name}: commit `{commit[:12]}`; {told}.")
    return " ".join(sentences)


def _commit(name: str, entry: Mapping[str, Any]) -> str:
    """Return the commit of a result, or the oldest of its figures'."""
    if "commit" in entry:
        return str(entry["commit"])
    result = json.loads((RESULTS / f"{name}.json").read_text())
    return oldest_commit(result["figures"]) if "figures" in result else str(result["builder"])


def oldest_commit(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return the commit of the figure that was measured first."""
    oldest = min(figures, key=lambda figure: str(figure["date"]))
    return str(oldest["commit"]).partition(" ")[0]  # without "with changes"
