"""Moves staged packages to their destination, all in one step.

Packages are assembled in a staging directory beside their destination. Then the whole destination is swapped in one
system call, so that at every moment all its packages are old or all are new. If the destination itself cannot be moved,
its packages are swapped one by one.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kernel_builder.package.foreign_files import foreign_file, is_variant
from kernel_format.errors import PackageError
from kernel_format.files import locked, remove_tree


@contextmanager
def staging(destination: Path, *, movable: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """Create a directory from which `publish` moves packages to `destination`, and remove it at the end.

    It is beside `destination`, or inside if `destination` cannot be moved: because of its place, or because one of its
    entries is not `movable` (default: packages are). A lock lets one build at a time have such a directory, also among
    builds with different caches. Leftovers of killed builds are removed, and their unfinished swaps undone.

    Raises:
        PackageError: If the directory cannot be written, or the disk is full.
    """
    parent = destination.parent if _can_be_swapped(destination, movable or _is_only_a_package) else destination
    prefix = f".{destination.name}.staging-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with locked(parent / f".{destination.name}.lock", remove=True):
            for previous in parent.glob(f".{destination.name if parent != destination else '*'}.previous"):
                if parent != destination or movable or is_variant(_original(previous).name):
                    _take_back(previous, movable or _is_only_a_package)
            for stale in parent.glob(f"{prefix}*"):
                remove_tree(stale)
            directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            try:
                yield directory
            finally:
                remove_tree(directory)
    except OSError as error:
        raise _unwritable(error, parent) from error


def _can_be_swapped(destination: Path, movable: Callable[[Path], bool]) -> bool:
    """Return whether a directory beside `destination` can take its place.

    It cannot if `destination` is a mount point, such as a container's volume, or if its parent cannot be written. It
    must not if `destination` is or contains the current directory, since the user's shell would stay in the old one,
    or if it contains other files, since a copy would lose their owners, modes and hard links.
    """
    if not destination.exists():
        return True
    if not all(map(movable, destination.iterdir())):
        return False
    if Path.cwd().is_relative_to(destination):
        return False
    owner = destination.stat()
    if os.geteuid() != 0 and (owner.st_uid != os.geteuid() or owner.st_gid not in {os.getegid(), *os.getgroups()}):
        return False
    if any(_mount(entry) != _mount(destination) for entry in destination.iterdir() if entry.is_dir()):
        return False
    return os.access(destination.parent, os.W_OK) and _mount(destination) == _mount(destination.parent)


def _is_only_a_package(entry: Path) -> bool:
    return foreign_file(entry) is None


def _mount(directory: Path) -> str:
    """Return the identity of a directory's mount. Bind mounts share their device number."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        match = re.search(r"^mnt_id:.*", Path(f"/proc/self/fdinfo/{descriptor}").read_text(), re.M)
        return match[0] if match else str(os.fstat(descriptor).st_dev)
    finally:
        os.close(descriptor)


def _unwritable(error: OSError, path: Path) -> PackageError:
    return PackageError(
        f"the package cannot be written: {error.strerror}",
        where=str(error.filename or path),
        hint="free some space, change the permissions, or choose another destination with --out; the old packages stay",
    )


def publish(staged: Path, destination: Path, *, replace_all: Sequence[str]) -> None:
    """Move the packages of `staged` to `destination`, in one step, or one by one if `staged` is inside it.

    Args:
        staged: The new packages, one directory for each; it is consumed.
        destination: The `build` directory, not a symbolic link; created if missing.
        replace_all: Names in `destination` to remove unless `staged` has them: packages that the project no longer
            offers. All other entries are kept.
    """
    if not destination.exists():
        staged.chmod(0o777 & ~_umask())
        staged.rename(destination)
        return
    before = destination.stat()
    if os.geteuid() == 0 or before.st_gid != staged.stat().st_gid:
        os.chown(staged, before.st_uid, before.st_gid)
    shutil.copystat(destination, staged)  # also access control lists
    new = sorted(path.name for path in staged.iterdir())
    if staged.parent == destination:
        for name in new:
            _exchange(staged / name, destination / name)
        for name in set(replace_all).difference(new):
            (destination / name).rename(staged / name)
        return
    for entry in sorted(destination.iterdir()):
        if entry.name not in {*replace_all, *new}:
            shutil.copytree(entry, staged / entry.name, symlinks=True, copy_function=_link)
    _exchange(staged, destination)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _exchange(first: Path, second: Path) -> None:
    """Swap two directories in one system call; if there is no `second`, rename `first` to it.

    Some file systems need two renames. If the process dies between them, the next `staging` undoes the first.
    """
    if not os.path.lexists(second):
        first.rename(second)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if done != 0:
        previous = second.with_name(f".{second.name}.previous")
        second.rename(previous)
        try:
            first.rename(second)
        except OSError:
            previous.rename(second)
            raise
        previous.rename(first)


def _take_back(previous: Path, movable: Callable[[Path], bool]) -> None:
    """Undo a swap that was interrupted between its two renames.

    Files of other programs with such a name stay, and so do those that they would replace.
    """
    original = _original(previous)
    if previous.is_symlink() or not previous.is_dir() or original.is_symlink():
        return
    if original.exists():
        if not all(map(movable, [original] if is_variant(original.name) else original.iterdir())):
            return
        shutil.rmtree(original)
    previous.rename(original)


def _original(previous: Path) -> Path:
    return previous.with_name(previous.name[1:].removesuffix(".previous"))
