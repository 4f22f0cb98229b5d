"""`hub gc`: frees the space of what nobody can need any more. `hub check` frees some of it as well.

Servers may run meanwhile: what an upload in progress needs is younger than what is freed, and every lock is held before
the files that it guards are examined.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pygit2

from kernel_hub.git.command import run_git
from kernel_hub.git.repository import GitRepository
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal
from kernel_hub.storage.locks import patiently, repository_lock

UPLOAD_SECONDS = 600.0  # between the storing of a large file and the record of its repository
UNCOMMITTED_SECONDS = 7 * 86400.0
XORB_SECONDS = 28 * 86400.0  # clients rely on xorbs for three weeks after they sent them

_GIT_SECONDS = 3600.0


@dataclass(frozen=True)
class Freed:
    """Space that `hub gc` has freed, or would free.

    Args:
        where: A repository, a large file, or a part of an upload.
        what: Why it is not needed.
        size: In bytes. 0 for a large file of a repository, whose space is freed when no repository has it.
    """

    where: str
    what: str
    size: int


def collect(hub: Hub, *, unused_seconds: float, dry_run: bool = False, now: float | None = None) -> Iterator[Freed]:
    """Free what no branch, tag or pull request needs, and what was not used for some time.

    Args:
        hub: The Hub; servers may be running on it.
        unused_seconds: Objects and large files that are younger stay. An upload that takes longer may fail.
        dry_run: Whether to free nothing, and only say what would be freed.
        now: The current time in seconds since 1970. None: the clock's.
    """
    now = time.time() if now is None else now
    before = now - unused_seconds
    referenced: set[str] = set()
    released: set[Path] = set()
    for repo_id in list(hub.repositories):
        try:
            repository = hub.repositories.open(repo_id)
            pointed, markers = patiently(partial(_release, repository, before, dry_run))
        except (Refusal, pygit2.GitError, KeyError, ValueError, OSError):  # deleted, busy or damaged: nothing is freed
            continue
        referenced |= pointed
        released |= markers
        for marker in sorted(markers):
            yield Freed(f"{repo_id}: large file {marker.name}", "no branch, tag or pull request has it", 0)
        size = _pack(repository.path, before, dry_run)
        if size > 0:
            yield Freed(f"{repo_id}: git objects", "no branch, tag or pull request has them", size)
        if not dry_run:
            with suppress(sqlite3.OperationalError):  # the disk is full; the next run tries again
                hub.index.refresh(repo_id, afresh=True)
    with suppress(Refusal):  # uploads hold the store's lock; the next run tries again
        yield from patiently(lambda: unowned_large_files(hub, referenced, released, now, dry_run))
    yield from unused_xorbs(hub, now, dry_run)


def _release(repository: GitRepository, before: float, dry_run: bool) -> tuple[set[str], set[Path]]:
    """Return the large files that the commits of a repository point to, and the markers of all others."""
    with repository_lock(repository.path, repository.repo_id):
        referenced = {large.sha256 for large in repository.owned.referenced()}
        return referenced, release_uncommitted(repository, referenced, before, dry_run)


def release_uncommitted(
    repository: GitRepository, referenced: Collection[str], before: float, dry_run: bool
) -> set[Path]:
    """Remove the markers of large files that were uploaded before a time, and that no commit of a ref points to.

    The caller holds the repository's lock.
    """
    markers = repository.owned.markers.iterdir()
    unused = {path for path in markers if path.name not in referenced and path.stat().st_mtime < before}
    if not dry_run:
        for marker in unused:
            marker.unlink()
    return unused


def unowned_large_files(
    hub: Hub, referenced: set[str], released: Collection[Path], now: float, dry_run: bool
) -> list[Freed]:
    """Remove the large files that no repository owns or refers to. No upload can finish meanwhile.

    Args:
        hub: The Hub.
        referenced: The large files that commits point to.
        released: Markers that do not count, since they would have been removed.
        now: The current time.
        dry_run: Whether to remove nothing.
    """
    freed = []
    with hub.store_lock.collecting():
        markers = hub.repositories.root.glob("*/*.git/large/*")
        wanted = referenced | {path.name for path in markers if path not in released}
        for sha256, changed in list(hub.large_files):
            if sha256 not in wanted and now - changed > UPLOAD_SECONDS:
                size = hub.large_files.size(sha256) or 0
                if not dry_run:
                    hub.large_files.remove(sha256)
                freed.append(Freed(f"large file {sha256}", "no repository owns it", size))
    return freed


def unused_xorbs(hub: Hub, now: float, dry_run: bool) -> Iterator[Freed]:
    """Remove the parts of Xet uploads that no client relies on any more."""
    for name, used in list(hub.xorbs):
        if now - used > XORB_SECONDS:
            size = hub.xorbs.size(name) or 0
            if not dry_run:
                hub.xorbs.remove(name)
                hub.index.grow_xorbs(name.partition("/")[0], -size)
            yield Freed(f"xorb {name}", "unused by uploads for four weeks", size)


def _pack(path: Path, before: float, dry_run: bool) -> int:
    """Pack a repository and drop objects from before a time that no ref reaches; return the freed bytes."""
    if shutil.which("git") is None:
        return 0
    expire = f"@{int(before)}"
    if dry_run:
        listed = _git(path, "prune", "--dry-run", f"--expire={expire}").split()
        loose = [path / "objects" / oid[:2] / oid[2:] for oid in listed if len(oid) == 40]
        return sum(file.stat().st_size for file in loose if file.is_file())
    size = _size(path)
    _git(path, "gc", "--quiet", f"--prune={expire}")
    return size - _size(path)


def _git(path: Path, *command: str) -> str:
    """Run git in a repository, and return what it prints. A failure leaves things as they are."""
    return run_git("-C", str(path), *command, seconds=_GIT_SECONDS).stdout


def _size(path: Path) -> int:
    total = 0
    for file in (path / "objects").rglob("*"):
        with suppress(FileNotFoundError):
            if file.is_file():
                total += file.stat().st_size
    return total
