"""The files that a candidate consists of: for copies and digests."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from kernel_format.files import digest_files, file_digest, remove_tree

_FILES, _BYTES, _LEVELS = 10_000, 256 << 20, 32
LIMITS = "10,000 files and directories, 256 MiB, and 32 levels of directories"
# Files that tools create in a project, as the patterns of names that `shutil.ignore_patterns` takes.
_TOOL_FILES = ("build", "__pycache__", "*.pyc", ".git", ".venv", ".pytest_cache")


def ignored(folder: str, names: Iterable[str]) -> set[str]:
    """Return the names in a folder that do not belong to a candidate."""
    return shutil.ignore_patterns(*_TOOL_FILES)(folder, list(names))


def _take(taken: Counter[str], path: Path, size: int = 0, levels: int = 0) -> None:
    """Count a file or a directory before it is written."""
    taken.update(files=1, bytes=size)
    if taken["files"] > _FILES or taken["bytes"] > _BYTES or levels > _LEVELS:
        raise OSError(errno.EFBIG, f"is too large: a candidate has at most {LIMITS}", str(path))


def copy_candidate(source: Path, target: Path, taken: Counter[str] | None = None) -> list[Path]:
    """Replace `target` by a copy of a candidate, without its symbolic links: an agent's may point anywhere.

    `taken` counts the files and bytes of all copies for one candidate. The result has the links' paths in it.

    Raises:
        OSError: If a file cannot be copied, becomes a link or a directory meanwhile, or exceeds a limit.
    """
    taken = Counter() if taken is None else taken
    remove_tree(target)
    if source.parent.resolve() != source.parent.absolute():
        raise OSError(errno.ELOOP, "is behind a symbolic link", str(source))
    if source.is_symlink() or not source.is_dir():
        _copy_file(source, target, taken)
        return []
    links = []
    for folder, folders, names, descriptor in os.fwalk(source):  # which follows no links
        inside = Path(folder).relative_to(source)
        _take(taken, Path(folder), levels=len(inside.parts))
        folders[:] = set(folders) - ignored(folder, folders)
        (target / inside).mkdir()
        for name in {*names, *folders} - ignored(folder, names):
            mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
            if stat.S_ISREG(mode):
                _copy_file(Path(name), target / inside / name, taken, descriptor)
            elif stat.S_ISLNK(mode):
                links.append(inside / name)
    return links


def _copy_file(name: Path, target: Path, taken: Counter[str], directory: int | None = None) -> None:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    with os.fdopen(descriptor, "rb"):
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(name))
        _take(taken, name, status.st_size)
        with target.open("xb") as copy:
            left = status.st_size  # no more, if it grows
            while left and (sent := os.sendfile(copy.fileno(), descriptor, None, left)):
                left -= sent
        target.chmod(status.st_mode & 0o777)


def candidate_digest(candidate: Path) -> str:
    """Return the SHA-256 of a candidate's files, in hexadecimal."""
    return digest_files(candidate, files_of(candidate)) if candidate.is_dir() else file_digest(candidate)


def files_of(directory: Path) -> list[Path]:
    """Return the files of a project, without those that its symbolic links lead to."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [path for path in files if not ignored("", path.relative_to(directory).parts)]
