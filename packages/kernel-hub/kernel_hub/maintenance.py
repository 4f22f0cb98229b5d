"""`kernel-hub check` and `kernel-hub gc`: repair the traces of crashes, report damage, and free unneeded files.

Servers may run meanwhile: only files that have not changed for a while count as left over or unneeded, and every lock
is held before the files that it guards are examined.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kernel_format.files import file_digest
from kernel_hub.git.command import run_git
from kernel_hub.git.repository import GitRepository
from kernel_hub.hub_service import UNREADABLE, Hub
from kernel_hub.refusals import Refusal
from kernel_hub.repositories.reader import file_sizes
from kernel_hub.storage.disk import repository_lock

LEFT_OVER_SECONDS = 600.0
_GIT_SECONDS = 3600.0


@dataclass(frozen=True)
class Defect:
    """A finding of `kernel-hub check`.

    Args:
        where: A file of the store, or a repository and an item in it.
        problem: The defect, and if it was not repaired, the remedy.
        repaired: Whether it was repaired.
    """

    where: str
    problem: str
    repaired: bool


def find_defects(hub: Hub, *, digests: bool = False, repair: bool = True) -> Iterator[Defect]:
    """Check the whole Hub, and repair defects as far as possible.

    Args:
        digests: Read every large file and compare its SHA-256 with its name.
        repair: Whether to repair; if not, defects are only reported.
    """
    yield from _left_over(hub, repair)
    for repo_id in list(hub.repositories):
        try:
            repository = hub.repositories.open(repo_id)
            with repository_lock(repository.path, repo_id):
                defects = _check_repository(hub, repository, repair)
        except UNREADABLE as error:
            yield Defect(repo_id, f"the repository cannot be read ({error}); restore it from a backup", False)
            continue
        except Refusal:  # just deleted, or locked by writers
            continue
        yield from defects
        if repair:
            _measure(hub, repo_id)
    if digests:
        yield from _damaged(hub, repair)


def _measure(hub: Hub, repo_id: str) -> None:
    with suppress(sqlite3.OperationalError):  # the disk is full; the next run tries again
        hub.index.refresh(repo_id, measure=True)


def _damaged(hub: Hub, repair: bool) -> Iterator[Defect]:
    for sha256 in list(hub.large_files):
        with suppress(FileNotFoundError):
            stamp = hub.large_files.stamp(sha256)
            if (actual := file_digest(hub.large_files.path(sha256))) != sha256:
                if repair:
                    hub.large_files.remove(sha256, stamp)
                problem = f"its content changed on the disk: its SHA-256 is {actual}. It is no longer served"
                yield Defect(f"large file {sha256}", f"{problem}; publish it again", False)


def _left_over(hub: Hub, repair: bool) -> Iterator[Defect]:
    repositories = hub.repositories.root
    paths = [
        *(hub.root / "incoming").iterdir(),
        *(path for path in repositories.glob("*/.*") if path.name.startswith((".new-", ".deleted-"))),
        # Objects that libgit2 was writing; `git gc` does not know libgit2's names.
        *repositories.glob("*/*.git/objects/tmp_object_git2_*"),
        *hub.root.glob(".secret.*"),
    ]
    yield from _old(hub, paths, "left over from an interrupted operation", repair)


def _old(hub: Hub, paths: Iterable[Path], problem: str, repair: bool) -> Iterator[Defect]:
    for path in paths:
        with suppress(FileNotFoundError):  # its owner has just removed it
            if time.time() - path.stat().st_mtime > LEFT_OVER_SECONDS:
                if repair:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                yield Defect(str(path.relative_to(hub.root)), problem, repair)


def _check_repository(hub: Hub, repository: GitRepository, repair: bool) -> list[Defect]:
    """Check one repository. The caller holds the repository's lock, which works on a full disk, too."""
    # Git keeps its lock of a ref or of the configuration for milliseconds, and servers take it under the repository's.
    locks = (*(repository.path / "refs").rglob("*.lock"), *repository.path.glob("*.lock"))
    defects = list(_old(hub, locks, "a lock of a killed git process", repair))
    for sha256, large in {large.sha256: large for large in repository.owned.referenced()}.items():
        # A pointer is no proof of an upload: the content may be private, and another repository's.
        stored = hub.large_files.size(sha256) if sha256 in repository.owned else None
        if stored != large.size:
            state = "is missing" if stored is None else f"has {stored} bytes instead of {large.size}"
            where = f"{repository.repo_id}: large file {sha256}"
            defects.append(Defect(where, f"{state}; publish the kernel again", False))
    return defects


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


def collect(hub: Hub, *, unused_seconds: float, dry_run: bool = False) -> Iterator[Freed]:
    """Free files and objects that no branch, tag or pull request needs, and that are old enough.

    Args:
        unused_seconds: Younger objects and large files stay. An upload that takes longer may fail.
        dry_run: Whether to free nothing, and only report.
    """
    before = time.time() - unused_seconds
    referenced: set[str] = set()
    released: set[Path] = set()
    for repo_id in list(hub.repositories):
        try:
            repository = hub.repositories.open(repo_id)
            with repository_lock(repository.path, repo_id):
                pointed = {large.sha256 for large in repository.owned.referenced()}
                old = [marker for marker in repository.owned.markers.iterdir() if marker.stat().st_mtime < before]
                markers = {marker for marker in old if marker.name not in pointed}
                for marker in () if dry_run else markers:
                    marker.unlink()
        except (Refusal, *UNREADABLE):  # deleted, busy or damaged: nothing is freed
            continue
        referenced |= pointed
        released |= markers
        for marker in sorted(markers):
            yield Freed(f"{repo_id}: large file {marker.name}", "no branch, tag or pull request has it", 0)
        size = _pack(repository, before, dry_run)
        if size > 0:
            yield Freed(f"{repo_id}: git objects", "no branch, tag or pull request has them", size)
        if not dry_run:
            _measure(hub, repo_id)
    stamps = {sha256: hub.large_files.stamp(sha256) for sha256 in list(hub.large_files)}
    with suppress(Refusal):  # a lock is not free; the next run tries again
        with hub.repositories.unmoved():
            present = hub.repositories.root.glob("*/*.git/large/*")  # an upload may have created a released one again
            wanted = referenced | {path.name for path in present if not (dry_run and path in released)}
        for sha256, stamp in stamps.items():
            if stamp and sha256 not in wanted:
                if not dry_run:
                    hub.large_files.remove(sha256, stamp)
                yield Freed(f"large file {sha256}", "no repository owns it", stamp[2])


def _pack(repository: GitRepository, before: float, dry_run: bool) -> int:
    """Pack a repository and drop objects from before a time that no ref reaches; return the freed bytes."""
    path = repository.path
    git = partial(run_git, "-C", str(path), seconds=_GIT_SECONDS)  # a failure changes nothing
    expire = f"@{int(before)}"
    if dry_run:
        listed = git("prune", "--dry-run", f"--expire={expire}").stdout.split()
        loose = [path / "objects" / oid[:2] / oid[2:] for oid in listed if len(oid) == 40]
        return sum(file.stat().st_size for file in loose if file.is_file())
    size = sum(file_sizes(path / "objects"))
    git("-c", "gc.cruftPacks=false", "gc", "--quiet", "--no-prune")
    with suppress(Refusal), repository_lock(path, repository.repo_id):  # else a commit could be pruned before its ref
        git("prune", f"--expire={expire}")
    return size - sum(file_sizes(path / "objects"))
