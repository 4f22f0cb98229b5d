"""`hub check`: mends the traces of crashes, and reports damaged and missing files.

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
from functools import partial
from pathlib import Path

import pygit2

from kernel_hub.git.repository import GitRepository
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal
from kernel_hub.retention import (
    UNCOMMITTED_SECONDS,
    release_uncommitted,
    unowned_large_files,
    unused_xorbs,
)
from kernel_hub.storage.locks import patiently, repository_lock

LEFT_OVER_SECONDS = 600.0


@dataclass(frozen=True)
class Defect:
    """A finding of `hub check`.

    Args:
        where: A file of the store, or a repository and an item in it.
        what: What is wrong.
        mended: Whether it was mended. If not, `what` says what to do.
    """

    where: str
    what: str
    mended: bool


def find_defects(hub: Hub, *, digests: bool = False, mend: bool = True, now: float | None = None) -> Iterator[Defect]:
    """Check everything that the Hub holds, and mend what can be mended.

    Args:
        hub: The Hub; servers may be running on it.
        digests: Read every large file and compare its SHA-256 with its name.
        mend: Whether to mend; if not, defects are only reported.
        now: The current time in seconds since 1970. None: the clock's.
    """
    now = time.time() if now is None else now
    yield from _left_over(hub, mend, now)
    referenced: set[str] = set()
    for repo_id in list(hub.repositories):
        try:
            repository = hub.repositories.open(repo_id)
            defects, pointed = patiently(partial(_repository, hub, repository, mend, now))
        except (pygit2.GitError, KeyError, ValueError, OSError) as error:
            yield Defect(repo_id, f"the repository cannot be read ({error}); restore it from a backup", False)
            continue
        except Refusal:  # just deleted, or locked by writers; the large files that it owns are kept
            continue
        yield from defects
        referenced |= pointed
        if mend:
            with suppress(sqlite3.OperationalError):  # the disk is full; the next check tries again
                hub.index.refresh(repo_id, afresh=True)
    try:
        for freed in patiently(lambda: unowned_large_files(hub, referenced, (), now, not mend)):
            yield Defect(freed.where, freed.what, mend)
    except Refusal:
        yield Defect(
            "large files", "uploads hold the store's lock, so unowned files were not checked; run this again", False
        )
    if digests:
        yield from _damaged(hub, mend)
    for freed in unused_xorbs(hub, now, not mend):
        yield Defect(freed.where, freed.what, mend)


def _damaged(hub: Hub, mend: bool) -> Iterator[Defect]:
    for sha256, _ in list(hub.large_files):
        try:
            actual = hub.large_files.digest(sha256)
        except FileNotFoundError:
            continue
        if actual != sha256:
            if mend:
                hub.large_files.remove(sha256)
            yield Defect(
                f"large file {sha256}",
                f"the disk has changed it: its SHA-256 is {actual}. It is no longer served; publish it again",
                False,
            )


def _left_over(hub: Hub, mend: bool, now: float) -> Iterator[Defect]:
    staged = [path for path in (hub.root / "incoming").iterdir() if path.is_file()]
    halves = [path for path in hub.repositories.root.glob("*/.*") if path.name.startswith((".new-", ".deleted-"))]
    # Objects that libgit2 was writing; `git gc` does not know libgit2's names.
    halves += hub.repositories.root.glob("*/*.git/objects/tmp_object_git2_*")
    secrets = list(hub.root.glob(".secret.*"))
    for path in (*staged, *halves, *secrets):
        try:
            if now - path.stat().st_mtime <= LEFT_OVER_SECONDS:
                continue
            if mend:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except FileNotFoundError:  # its owner has just removed it
            continue
        yield Defect(str(path.relative_to(hub.root)), "left over from an interrupted operation", mend)


def _repository(hub: Hub, repository: GitRepository, mend: bool, now: float) -> tuple[list[Defect], set[str]]:
    """Check one repository; return its defects and the digests of the large files that its commits point to."""
    defects = []
    with repository_lock(repository.path, repository.repo_id):  # works on a full disk, too
        for lock in repository.refs.lock_files.stale():
            if mend:
                lock.unlink(missing_ok=True)
            defects.append(Defect(str(lock.relative_to(hub.root)), "a git lock of a server that was killed", mend))
        for lock in _others_locks(repository.path, now):
            what = "held by another process for long; delete it if no process of git runs in this repository"
            defects.append(Defect(str(lock.relative_to(hub.root)), what, False))
        referenced = {large.sha256: large for large in repository.owned.referenced()}
        for sha256, large in referenced.items():
            stored = hub.large_files.size(sha256)
            if stored is None and repository.mirror_of is not None:  # nobody has read it yet
                continue
            if stored != large.size:
                state = "is missing" if stored is None else f"has {stored} bytes instead of {large.size}"
                defects.append(
                    Defect(f"{repository.repo_id}: large file {sha256}", f"{state}; publish the kernel again", False)
                )
            elif sha256 not in repository.owned:
                if mend:
                    repository.owned.add([sha256])
                defects.append(
                    Defect(f"{repository.repo_id}: large file {sha256}", "was not recorded as its own", mend)
                )
        for marker in release_uncommitted(repository, referenced, now - UNCOMMITTED_SECONDS, not mend):
            where = f"{repository.repo_id}: large file {marker.name}"
            defects.append(Defect(where, "was uploaded, but no branch, tag or pull request has it", mend))
    return defects, set(referenced)


def _others_locks(path: Path, now: float) -> Iterator[Path]:
    """Find old lock files of git that this Hub did not make. Their holder may live, so they are left alone."""
    for lock in (*(path / "refs").rglob("*.lock"), *path.glob("*.lock")):
        try:
            if now - lock.stat().st_mtime > LEFT_OVER_SECONDS:
                yield lock
        except FileNotFoundError:
            continue
