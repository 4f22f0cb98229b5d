"""`kernel-hub gc`: frees the space of files and objects that no ref needs.

Servers may run meanwhile: files of an upload in progress are younger than the freed ones, and every lock is held before
the files that it guards are examined.
"""

from __future__ import annotations

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
from kernel_hub.repositories.reader import object_bytes
from kernel_hub.storage.locks import repository_lock

_GIT_SECONDS = 3600.0


@dataclass(frozen=True)
class Freed:
    """Space that `kernel-hub gc` has freed, or would free.

    Args:
        where: A repository, or a large file.
        reason: Why it is not needed.
        size: In bytes. 0 for a large file of a repository, whose space is freed when no repository owns the file.
    """

    where: str
    reason: str
    size: int


def collect(hub: Hub, *, unused_seconds: float, dry_run: bool = False, now: float | None = None) -> Iterator[Freed]:
    """Free files and objects that no branch, tag or pull request needs, and that are old enough.

    Args:
        hub: The Hub; servers may be running on it.
        unused_seconds: Younger objects and large files stay. An upload that takes longer may fail.
        dry_run: Whether to free nothing, and only report.
        now: The current time in seconds since 1970. None: the clock's.
    """
    now = time.time() if now is None else now
    before = now - unused_seconds
    referenced: set[str] = set()
    released: set[Path] = set()
    for repo_id in list(hub.repositories):
        try:
            repository = hub.repositories.open(repo_id)
            with repository_lock(repository.path, repo_id):
                pointed = {large.sha256 for large in repository.owned.referenced()}
                markers = _release_uncommitted(repository, pointed, before, dry_run)
        except (Refusal, pygit2.GitError, KeyError, ValueError, OSError):  # deleted, busy or damaged: nothing is freed
            continue
        referenced |= pointed
        released |= markers
        for marker in sorted(markers):
            yield Freed(f"{repo_id}: large file {marker.name}", "no branch, tag or pull request has it", 0)
        size = _pack(repository, before, dry_run)
        if size > 0:
            yield Freed(f"{repo_id}: git objects", "no branch, tag or pull request has them", size)
        if not dry_run:
            with suppress(sqlite3.OperationalError):  # the disk is full; the next run tries again
                hub.index.refresh(repo_id, measure=True)
    with suppress(Refusal):  # the store's lock is not free; the next run tries again
        yield from _unowned_large_files(hub, referenced, released, dry_run)


def _release_uncommitted(
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


def _unowned_large_files(hub: Hub, referenced: set[str], released: Collection[Path], dry_run: bool) -> list[Freed]:
    """Remove the large files that no repository owns or refers to. No upload can finish meanwhile.

    Args:
        hub: The Hub.
        referenced: The large files that commits point to.
        released: Markers that were removed. An upload may have created one of them again.
        dry_run: Whether to remove nothing.
    """
    freed = []
    with hub.large_files.locked():
        markers = hub.repositories.root.glob("*/*.git/large/*")
        wanted = referenced | {path.name for path in markers if not (dry_run and path in released)}
        for sha256 in list(hub.large_files):
            if sha256 not in wanted:
                size = hub.large_files.size(sha256) or 0
                if not dry_run:
                    hub.large_files.remove(sha256)
                freed.append(Freed(f"large file {sha256}", "no repository owns it", size))
    return freed


def _pack(repository: GitRepository, before: float, dry_run: bool) -> int:
    """Pack a repository and drop objects from before a time that no ref reaches; return the freed bytes."""
    path = repository.path
    git = partial(run_git, "-C", str(path), seconds=_GIT_SECONDS)  # a failure changes nothing
    expire = f"@{int(before)}"
    if dry_run:
        listed = git("prune", "--dry-run", f"--expire={expire}").stdout.split()
        loose = [path / "objects" / oid[:2] / oid[2:] for oid in listed if len(oid) == 40]
        return sum(file.stat().st_size for file in loose if file.is_file())
    size = object_bytes(path)
    git("-c", "gc.cruftPacks=false", "gc", "--quiet", "--no-prune")
    with suppress(Refusal), repository_lock(path, repository.repo_id):  # else a commit could be pruned before its ref
        git("prune", f"--expire={expire}")
    return size - object_bytes(path)
