"""Files that several processes read and write: atomic writes, locks, temporary directories, and digests."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from kernel_format.errors import BuildError, StoreError

# How a file begins that git-lfs has not replaced by its content.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_TEMPORARY = "kernel-builder-tmp-"
_LOCK_SECONDS = 0.05  # between two looks at a lock
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Open a new file that takes the name `path` when the context ends without an exception.

    A reader finds the whole old content or the whole new content. The content is on the disk before the file takes its
    name, so a crash cannot leave an empty file. If the file system permits, the file has no name until then, so a
    killed process leaves no file; only a replacement has a temporary name for a moment. `path` is not a symbolic link.

    Raises:
        OSError: If the directory cannot be written, or the disk is full; the old file is kept.
    """
    staged = None
    named = path.parent / f".{path.name}.{os.urandom(4).hex()}"
    try:
        try:
            descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError:
            descriptor = os.open(named, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            staged = named
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
            if staged is None:
                # Only with `src_dir_fd`, which an absolute path does not need, Python follows the link in /proc.
                unnamed = f"/proc/self/fd/{descriptor}"
                try:
                    os.link(unnamed, path, src_dir_fd=descriptor)
                    return
                except FileExistsError:  # a link cannot replace a file
                    os.link(unnamed, named, src_dir_fd=descriptor)
                    staged = named
        staged.replace(path)
    except BaseException as error:
        if staged is not None:
            staged.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(named)):
            error.filename = str(path)
        raise


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Write a file whole or not at all, as `replacing` does."""
    with replacing(path, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_files(directory: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files, given by their paths below a directory, and the directories around them."""
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def writing(directory: Path, title: str = "the cache", remedy: str = "free some space") -> Iterator[None]:
    """Raise a StoreError if a directory of the cache cannot be written."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{title} cannot be written: {error.strerror}",
            where=str(error.filename or directory),
            hint=f"{remedy}, or set KERNEL_BUILDER_CACHE to a directory that can be written",
        ) from error


@contextmanager
def replaced_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory that takes the name `path` when the context ends without an exception.

    An old directory has the name until then, and keeps it after an error.

    Raises:
        OSError: If the parent directory cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
            staged = Path(scratch, "new")
            staged.mkdir()
            yield staged
            take_name(staged, path)
    except OSError as error:
        if not error.filename or f"/.{path.name}." in str(error.filename):  # a full disk, or a temporary name
            error.filename = str(path)
        raise


def take_name(new: Path, old: Path) -> None:
    """Give a directory the name of another one, which gets the name of the first, in one system call.

    File systems that cannot do so need two renames, between which `old` does not exist.
    """
    if not old.exists():
        new.rename(old)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return
    previous = new.with_name(f"{new.name}.previous")
    old.rename(previous)
    try:
        new.rename(old)
    except OSError:
        previous.rename(old)
        raise


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file of any size, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest_files(root: Path, paths: Iterable[Path]) -> str:
    """Return one SHA-256 over files and all files of directories: over their names below `root` and their contents."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                content = file_digest(file)
                digest.update(f"{file.relative_to(root).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def read_unchanged(path: Path, expected: str) -> bytes:
    """Return the content of a project's file, whose SHA-256 was `expected` when the build was planned.

    Raises:
        BuildError: If the file has changed, or cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError:
        content = None
    if content is None or hashlib.sha256(content).hexdigest() != expected:
        raise BuildError("the file changed while it was being built", where=str(path), hint="run the build again")
    return content


def debugging() -> bool:
    """Return whether KERNEL_BUILDER_DEBUG=keep is set.

    Then temporary directories are kept and printed.
    """
    return os.environ.get("KERNEL_BUILDER_DEBUG") == "keep"


@contextmanager
def temporary_directory(parent: Path | None = None) -> Iterator[Path]:
    """Create a directory of this user alone, by default in the system's, and remove it at the end with all its content.

    A lock marks it as used. The next process that creates one removes those of killed processes. Programs of such a
    process may still run; those with relative paths stay in their directory.
    """
    parent = parent or Path(tempfile.gettempdir())
    if not debugging():
        _remove_abandoned(parent)
    directory, descriptor = _locked_directory(parent)
    try:
        yield directory
    finally:
        if debugging():
            print(f"kept: {directory}", file=sys.stderr, flush=True)
        else:
            remove_tree(directory)
        os.close(descriptor)


def _locked_directory(parent: Path) -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
        with suppress(FileNotFoundError):  # another process has removed it before it was locked
            descriptor = os.open(directory, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # shared, since programs that run inside may lock it too
            if directory.exists():
                return directory, descriptor
            os.close(descriptor)


@cache
def _remove_abandoned(parent: Path) -> None:
    """Remove temporary directories of this user whose process has ended."""
    for directory in parent.glob(f"{_TEMPORARY}*"):
        with suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(directory)
            finally:
                os.close(descriptor)


def remove_tree(directory: Path) -> None:
    """Remove a directory of untrusted content, if it exists, as far as that is possible."""
    if not os.path.lexists(directory):
        return
    try:
        shutil.rmtree(directory)
    except (OSError, RecursionError):  # directories a thousand deep, or without permissions
        command = 'rm -rf -- "$0" || { [ -L "$0" ] || chmod -R u+rwx -- "$0"; rm -rf -- "$0"; }'
        subprocess.run(["sh", "-c", command, directory], stderr=subprocess.DEVNULL, check=False)


@contextmanager
def size_limit(size: int) -> Iterator[None]:
    """Limit the size of files that this process writes: larger writes fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    lower = size if soft == resource.RLIM_INFINITY else min(size, soft)
    resource.setrlimit(resource.RLIMIT_FSIZE, (lower, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class InUse(Exception):
    """Another process or thread holds the lock."""


def give_up() -> None:
    """Do not wait for a lock."""
    raise InUse


@contextmanager
def locked(
    path: Path, *, waiting: Callable[[], None] = lambda: None, remove: bool = False, patience: float = 0
) -> Iterator[None]:
    """Hold the lock at `path`, which is freed when its holder dies.

    Args:
        waiting: Called once if another process or thread holds the lock; may raise an exception in order not to wait.
        patience: Seconds to wait before `waiting` is called.
        remove: Remove the file at the end. Waiting processes then lock a new file.

    Raises:
        OSError: If the directory of `path` cannot be written.
    """
    end = time.monotonic() + patience
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            while not _is_free(descriptor):
                if time.monotonic() >= end:
                    waiting()
                    end = math.inf
                time.sleep(_LOCK_SECONDS)
            if os.fstat(descriptor).st_nlink == 0:  # its last holder has removed it
                continue
            try:
                yield
            finally:
                if remove:
                    path.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Lock an open file, unless another process or thread has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
