"""Git's lock files, which `git` itself and this Hub take before they change a ref or the configuration.

Git changes `NAME` by creating `NAME.lock`, writing the new content into it, and renaming it. A killed process leaves
its lock file, and others cannot know whether the holder lives: nobody may remove a lock file of somebody else. So the
Hub makes its own as a hard link to a file in `hub-locks`. Who makes one also holds the repository's lock. The next
holder of that one, who finds a lock file whose inode is in `hub-locks`, knows that a killed Hub process made it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kernel_hub.refusals import NotFree
from kernel_hub.storage.blobs import sync_filesystem
from kernel_hub.storage.locks import POLL_SECONDS

HOLD_SECONDS = 0.1  # longer than git needs for most of its changes; then the whole operation is tried again


class HeldFile:
    """A file of a git directory, locked against changes by others."""

    def __init__(self, root: Path, name: str, staged: Path) -> None:
        self._root = root
        self.path = root / name
        self.lock = root / f"{name}.lock"
        self.staged = staged

    def replace(self, content: bytes) -> None:
        """Give the file a new content, durably, and free the lock. Everything written before is durable, too."""
        self.staged.write_bytes(content)
        sync_filesystem(self._root)
        try:
            self.lock.rename(self.path)
        except IsADirectoryError:
            _remove_empty(self.path)  # directories of refs that were deleted
            self.lock.rename(self.path)
        sync_filesystem(self._root)

    def delete(self) -> None:
        """Delete the file, if it exists, durably."""
        self.path.unlink(missing_ok=True)
        sync_filesystem(self._root)


class GitLockFiles:
    """The lock files of the git directory `root`. The caller holds the repository's lock."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._staging = root / "hub-locks"

    @contextmanager
    def holding(self, name: str) -> Iterator[HeldFile]:
        """Lock a file of the git directory, such as `refs/heads/main` or `config`.

        Raises:
            NotFree: If another process, such as `git gc`, holds git's lock.
        """
        self._staging.mkdir(exist_ok=True)
        held = HeldFile(self._root, name, self._staging / uuid.uuid4().hex)
        held.staged.touch()
        try:
            self._link(held)
            try:
                yield held
            finally:
                with suppress(FileNotFoundError):  # `replace` has renamed it
                    if held.lock.samefile(held.staged):
                        held.lock.unlink()
        finally:
            held.staged.unlink()

    def _link(self, held: HeldFile) -> None:
        until = time.monotonic() + HOLD_SECONDS
        while True:
            held.lock.parent.mkdir(parents=True, exist_ok=True)
            try:
                held.lock.hardlink_to(held.staged)
                return
            except FileNotFoundError:  # git has just removed the empty directory
                pass
            except FileExistsError:
                if (made := self._made(held.lock)) is not None:
                    held.lock.unlink(missing_ok=True)
                    made.unlink(missing_ok=True)
                    continue
            if time.monotonic() > until:
                raise NotFree(
                    f"git's lock file {held.lock.relative_to(self._root)} is held by another process; try again. If no "
                    "process of git runs in this repository, delete it"
                )
            time.sleep(POLL_SECONDS)

    def _made(self, lock: Path) -> Path | None:
        """Return the file in `hub-locks` that a Hub process made this lock file from, or None if none did."""
        try:
            inode = lock.stat().st_ino
        except FileNotFoundError:
            return None
        return next((Path(entry.path) for entry in os.scandir(self._staging) if entry.inode() == inode), None)

    def stale(self) -> list[Path]:
        """List the lock files that killed Hub processes left, and after them what `hub-locks` holds of them."""
        if not self._staging.is_dir():
            return []
        locks = [*(self._root / "refs").rglob("*.lock"), *self._root.glob("*.lock")]
        return [lock for lock in locks if self._made(lock) is not None] + list(self._staging.iterdir())


def _remove_empty(folder: Path) -> None:
    for path in folder.iterdir():
        _remove_empty(path)
    folder.rmdir()
