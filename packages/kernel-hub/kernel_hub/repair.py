"""`kernel-hub check`: repairs the traces of crashes, and reports damaged and missing files.

Servers may run meanwhile: only files that have not changed for a while count as left over, and every lock is held
before the files that it guards are examined.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pygit2

from kernel_format.files import file_digest
from kernel_hub.git.repository import GitRepository
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal
from kernel_hub.storage.locks import repository_lock

LEFT_OVER_SECONDS = 600.0


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


def find_defects(hub: Hub, *, digests: bool = False, repair: bool = True, now: float | None = None) -> Iterator[Defect]:
    """Check the whole Hub, and repair defects as far as possible.

    Args:
        hub: The Hub; servers may be running on it.
        digests: Read every large file and compare its SHA-256 with its name.
        repair: Whether to repair; if not, defects are only reported.
        now: The current time in seconds since 1970. None: the clock's.
    """
    now = time.time() if now is None else now
    yield from _left_over(hub, repair, now)
    for repo_id in list(hub.repositories):
        try:
            repository = hub.repositories.open(repo_id)
            with repository_lock(repository.path, repo_id):
                defects = _check_repository(hub, repository, repair, now)
        except (pygit2.GitError, KeyError, ValueError, OSError) as error:
            yield Defect(repo_id, f"the repository cannot be read ({error}); restore it from a backup", False)
            continue
        except Refusal:  # just deleted, or locked by writers
            continue
        yield from defects
        if repair:
            with suppress(sqlite3.OperationalError):  # the disk is full; the next check tries again
                hub.index.refresh(repo_id, measure=True)
    if digests:
        yield from _damaged(hub, repair)


def _damaged(hub: Hub, repair: bool) -> Iterator[Defect]:
    for sha256 in list(hub.large_files):
        try:
            actual = file_digest(hub.large_files.path(sha256))
        except FileNotFoundError:
            continue
        if actual != sha256:
            if repair:
                hub.large_files.remove(sha256)
            yield Defect(
                f"large file {sha256}",
                f"its content changed on the disk: its SHA-256 is {actual}. It is no longer served; publish it again",
                False,
            )


def _left_over(hub: Hub, repair: bool, now: float) -> Iterator[Defect]:
    repositories = hub.repositories.root
    paths = [
        *(hub.root / "incoming").iterdir(),
        *(path for path in repositories.glob("*/.*") if path.name.startswith((".new-", ".deleted-"))),
        # Objects that libgit2 was writing; `git gc` does not know libgit2's names.
        *repositories.glob("*/*.git/objects/tmp_object_git2_*"),
        *hub.root.glob(".secret.*"),
    ]
    for path in paths:
        try:
            if now - path.stat().st_mtime <= LEFT_OVER_SECONDS:
                continue
            if repair:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except FileNotFoundError:  # its owner has just removed it
            continue
        yield Defect(str(path.relative_to(hub.root)), "left over from an interrupted operation", repair)


def _check_repository(hub: Hub, repository: GitRepository, repair: bool, now: float) -> list[Defect]:
    """Check one repository. The caller holds the repository's lock, which works on a full disk, too."""
    defects = []
    # Git keeps its lock of a ref or of the configuration for milliseconds, and servers take it under the repository's.
    for lock in (*(repository.path / "refs").rglob("*.lock"), *repository.path.glob("*.lock")):
        with suppress(FileNotFoundError):
            if now - lock.stat().st_mtime > LEFT_OVER_SECONDS:
                if repair:
                    lock.unlink()
                defects.append(Defect(str(lock.relative_to(hub.root)), "a lock of a killed git process", repair))
    for sha256, large in {large.sha256: large for large in repository.owned.referenced()}.items():
        # A pointer is no proof of an upload: the content may be private, and another repository's.
        stored = hub.large_files.size(sha256) if sha256 in repository.owned else None
        if stored != large.size:
            state = "is missing" if stored is None else f"has {stored} bytes instead of {large.size}"
            where = f"{repository.repo_id}: large file {sha256}"
            defects.append(Defect(where, f"{state}; publish the kernel again", False))
    return defects
