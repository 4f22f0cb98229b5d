"""The files that a candidate consists of: for copies and digests."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from kernel_format.files import digest_files, file_digest, remove_tree

# Files that tools create in a project, as the patterns of names that `shutil.ignore_patterns` takes.
_TOOL_FILES = ("build", "__pycache__", "*.pyc", ".git", ".venv", ".pytest_cache")


def ignored(folder: str, names: Iterable[str]) -> set[str]:
    """Return the names in a folder that do not belong to a candidate."""
    return shutil.ignore_patterns(*_TOOL_FILES)(folder, list(names))


def copy_candidate(source: Path, target: Path) -> None:
    """Replace `target` by a copy of a candidate, without its symbolic links: an agent's may point anywhere.

    Raises:
        OSError: If a file cannot be copied, or becomes a link or a directory meanwhile.
    """
    remove_tree(target)
    if source.parent.resolve() != source.parent.absolute():
        raise OSError(errno.ELOOP, "is behind a symbolic link", str(source))
    if source.is_symlink() or not source.is_dir():
        _copy_file(source, target)
        return
    for folder, folders, names, descriptor in os.fwalk(source):  # which follows no links
        folders[:] = set(folders) - ignored(folder, folders)
        copy = target / Path(folder).relative_to(source)
        copy.mkdir()
        for name in set(names) - ignored(folder, names):
            if stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                _copy_file(name, copy / name, descriptor)


def _copy_file(name: str | Path, target: Path, directory: int | None = None) -> None:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(name))
        with target.open("xb") as copy:
            shutil.copyfileobj(file, copy)
        target.chmod(os.fstat(descriptor).st_mode & 0o777)


def candidate_digest(candidate: Path) -> str:
    """Return the SHA-256 of a candidate's files, in hexadecimal."""
    return digest_files(candidate, files_of(candidate)) if candidate.is_dir() else file_digest(candidate)


def files_of(directory: Path) -> list[Path]:
    """Return the files of a project, without those that its symbolic links lead to."""
    files = []
    for path in sorted(directory.rglob("*")):
        names = path.relative_to(directory).parts
        if path.is_file() and not path.is_symlink() and not ignored("", names):
            files.append(path)
    return files
