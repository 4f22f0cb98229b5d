"""What `hub check` finds and mends: what a crash left, and what a disk lost.

Nothing that a running server may still be using is touched: left-overs are those that nobody changed for a while, and
locks are taken before what they guard is looked at.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pygit2

from kernel_builder.server.git_repository import Repository
from kernel_builder.server.hub_service import Hub
from kernel_builder.server.refusals import Refusal

LEFT_OVER_SECONDS = 600.0
UNCOMMITTED_SECONDS = 7 * 86400.0
XORB_SECONDS = 28 * 86400.0


@dataclass(frozen=True)
class Found:
    """Something that should not be as it is.

    Args:
        where: A file of the store, or a repository and what in it.
        what: What is wrong.
        mended: Whether it is as it should be now; if not, something is lost, and `what` says what to do.
    """

    where: str
    what: str
    mended: bool


def check(hub: Hub, *, digests: bool = False, mend: bool = True, now: float | None = None) -> Iterator[Found]:
    """Look at everything that the Hub holds, and mend what can be.

    Args:
        hub: The Hub; servers may be running on it.
        digests: Read every large file, and compare its SHA-256 with its name.
        mend: Whether to remove what is left over; otherwise it is only named.
        now: The time to compare with, in seconds since 1970.
    """
    now = time.time() if now is None else now
    yield from _left_over(hub, mend, now)
    referenced: set[str] = set()
    for repo_id in list(hub.repositories):
        try:
            found, pointed = _repository(hub, hub.repositories.open(repo_id), mend, now)
        except (pygit2.GitError, KeyError, ValueError, OSError) as error:
            yield Found(repo_id, f"the repository cannot be read ({error}); restore it from a copy", False)
            continue
        except Refusal:  # deleted just now, or being written all the time; what it notes as its own is kept
            continue
        yield from found
        referenced |= pointed
    try:
        yield from _unowned(hub, referenced, mend, now)
    except Refusal:
        yield Found(
            "large files", "come in all the time, so that unowned ones were not looked for; run this again", False
        )
    if digests:
        yield from _damaged(hub, mend)
    for name, used in list(hub.xorbs):
        if now - used > XORB_SECONDS:
            if mend:
                hub.xorbs.remove(name)
            yield Found(f"xorb {name}", "no upload has used it for four weeks", mend)


def _unowned(hub: Hub, referenced: set[str], mend: bool, now: float) -> list[Found]:
    """Large files that no repository has. None comes in while they go."""
    found = []
    with hub.keeping(alone=True):
        wanted = referenced | {path.name for path in hub.repositories.root.glob("*/*.git/large/*")}
        for sha256, changed in list(hub.large_files):
            if sha256 not in wanted and now - changed > LEFT_OVER_SECONDS:
                if mend:
                    hub.large_files.remove(sha256)
                found.append(Found(f"large file {sha256}", "no repository has it", mend))
    return found


def _damaged(hub: Hub, mend: bool) -> Iterator[Found]:
    for sha256, _ in list(hub.large_files):
        try:
            actual = hub.large_files.digest(sha256)
        except FileNotFoundError:
            continue
        if actual != sha256:
            if mend:
                hub.large_files.remove(sha256)
            yield Found(
                f"large file {sha256}",
                f"the disk has changed it: its SHA-256 is {actual}. It is not served any more; publish it again",
                False,
            )


def _left_over(hub: Hub, mend: bool, now: float) -> Iterator[Found]:
    staged = [path for path in (hub.root / "incoming").iterdir() if path.is_file()]
    halves = [path for path in hub.repositories.root.glob("*/.*") if path.name.startswith((".new-", ".deleted-"))]
    # Objects on their way to the disk; git's own clean-up does not know libgit2's names.
    halves += hub.repositories.root.glob("*/*.git/objects/tmp_object_git2_*")
    secrets = list(hub.root.glob(".secret.*"))
    for path in (*staged, *halves, *secrets):
        try:
            if now - path.stat().st_mtime <= LEFT_OVER_SECONDS:
                continue
            if mend:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except FileNotFoundError:  # whoever made it has just removed it
            continue
        yield Found(str(path.relative_to(hub.root)), "was left by something that did not end", mend)


def _repository(hub: Hub, repository: Repository, mend: bool, now: float) -> tuple[list[Found], set[str]]:
    found = []
    with repository.locked():
        for lock in _git_locks(repository.path):
            if mend:
                lock.unlink()
            found.append(Found(str(lock.relative_to(hub.root)), "is a lock that nobody holds", mend))
        referenced = {large.sha256: large for large in repository.referenced()}
        for sha256, large in referenced.items():
            stored = hub.large_files.size(sha256)
            if stored != large.size:
                state = "is missing" if stored is None else f"has {stored} bytes instead of {large.size}"
                found.append(
                    Found(f"{repository.repo_id}: large file {sha256}", f"{state}; publish the kernel again", False)
                )
            elif not repository.owns(sha256):
                if mend:
                    repository.own([sha256])
                found.append(Found(f"{repository.repo_id}: large file {sha256}", "was not noted as its own", mend))
        for marker in list(repository.large.iterdir()):
            if marker.name not in referenced and now - marker.stat().st_mtime > UNCOMMITTED_SECONDS:
                if mend:
                    marker.unlink()
                found.append(
                    Found(f"{repository.repo_id}: large file {marker.name}", "was sent, but never committed", mend)
                )
    return found, set(referenced)


def _git_locks(path: Path) -> list[Path]:
    return [*(path / "refs").rglob("*.lock"), *path.glob("*.lock")]
