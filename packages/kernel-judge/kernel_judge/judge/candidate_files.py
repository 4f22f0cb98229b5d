"""The files that a candidate consists of: for copies and digests."""

from __future__ import annotations

import shutil
from pathlib import Path

from kernel_format.files import digest_files, file_digest, remove_tree

# Files that tools create in a project, as the patterns of names that `shutil.ignore_patterns` takes.
_TOOL_FILES = ("build", "__pycache__", "*.pyc", ".git", ".venv", ".pytest_cache")

ignored = shutil.ignore_patterns(*_TOOL_FILES)
"""An `ignore` for `shutil.copytree`: the names that do not belong to a candidate."""


def copy_candidate(source: Path, target: Path) -> None:
    """Replace `target` by a copy of a candidate. Symbolic links stay links: an agent's may point anywhere."""
    if target.is_dir():
        remove_tree(target)
    if source.is_file():
        shutil.copyfile(source, target)
    else:
        shutil.copytree(source, target, symlinks=True, ignore=ignored)


def candidate_digest(candidate: Path) -> str:
    """Return the SHA-256 of a candidate's files, in hexadecimal."""
    if candidate.is_file():
        return file_digest(candidate)
    return digest_files(candidate, _files(candidate))


def _files(directory: Path) -> list[Path]:
    files = []
    for path in sorted(directory.rglob("*")):
        names = path.relative_to(directory).parts
        if path.is_file() and not ignored("", list(names)):
            files.append(path)
    return files
