"""A read-through mirror: repositories of another Hub, copied when somebody asks for them.

A copy is a git repository with the same commits. Its small files come with the commits; a large file is downloaded when
it is first read, and stored if it has the digest that its commit says. So a copy serves what was read of it while the
other Hub cannot be reached.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

import anyio
from anyio import to_thread

from kernel_hub import names
from kernel_hub.git.refs import GitRefs
from kernel_hub.git.repository import GitRepository
from kernel_hub.mirror.admission import Admission
from kernel_hub.mirror.downloads import Downloads, Keep
from kernel_hub.mirror.upstream import Upstream, UpstreamError, check_objects
from kernel_hub.refusals import Refusal, busy, not_mirrored
from kernel_hub.repositories.allowances import Allowances
from kernel_hub.repositories.store import RepositoryStore
from kernel_hub.settings import MirrorSettings
from kernel_hub.storage.large_files import LargeFiles
from kernel_hub.storage.locks import patiently

log = logging.getLogger("kernel_hub")

FETCHES = 4  # repositories that are fetched at once
WAITING = 32  # others that wait for it
_AFTER_FAILURE = 30.0  # seconds until the other Hub is asked again
_REMEMBERED = 10_000  # repositories

_Until = float


class Mirror:
    """The copies in one Hub.

    Args:
        keep: Stores complete large files of a repository.

    Attributes:
        admission: Decides which packages are served.
        downloads: The large files that are being copied.
    """

    def __init__(
        self,
        settings: MirrorSettings,
        repositories: RepositoryStore,
        large_files: LargeFiles,
        allowances: Allowances,
        keep: Keep,
    ) -> None:
        self._settings = settings
        self._repositories = repositories
        self._allowances = allowances
        self._upstream = Upstream(settings.url)
        self.admission = Admission(settings)
        self.downloads = Downloads(self._upstream, repositories, large_files, allowances, keep)
        self._fresh: dict[str, _Until] = {}
        self._turns: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._asking = 0
        self._limiter = anyio.CapacityLimiter(FETCHES)

    async def ensure(self, repo_id: str, before_waiting: Callable[[], None]) -> None:
        """Copy a repository, or bring its copy up to date, if it belongs to a mirrored organisation and this is due.

        Args:
            before_waiting: Called before the other Hub is asked.

        Raises:
            Refusal: If there is no copy, and the other Hub cannot be reached; or if too many wait for it.
        """
        if repo_id.partition("/")[0] not in self._settings.organizations or self._is_fresh(repo_id):
            return
        if self._asking >= FETCHES + WAITING:
            raise busy(f"{WAITING} requests wait for {self._upstream.url}; try again in a few seconds")
        before_waiting()
        turn = self._turns.setdefault(repo_id, anyio.Lock())
        self._asking += 1
        try:
            async with turn:
                if not self._is_fresh(repo_id):
                    await to_thread.run_sync(self._refresh, repo_id, limiter=self._limiter)
        finally:
            self._asking -= 1

    def _is_fresh(self, repo_id: str) -> bool:
        return self._fresh.get(repo_id, 0.0) > time.monotonic()

    def _remember(self, repo_id: str, seconds: float) -> None:
        if len(self._fresh) > _REMEMBERED:  # names that do not exist cost the other Hub a request each, and no memory
            self._fresh.clear()
        self._fresh[repo_id] = time.monotonic() + seconds

    def _refresh(self, repo_id: str) -> None:
        copy = self._repositories.open(repo_id) if repo_id in self._repositories else None
        if (copy is None and self._repositories.moved_to(repo_id)) or (copy is not None and copy.mirror_of is None):
            self._remember(repo_id, self._settings.refresh_seconds)  # a repository of this Hub has the name
            return
        try:
            refs = self._upstream.refs(repo_id)
            seconds = self._settings.refresh_seconds
            if refs is None:
                seconds = min(seconds, _AFTER_FAILURE)
                if copy is not None:
                    log.warning("%s is no longer on %s; its copy is served", repo_id, self._upstream.url)
            elif copy is None:
                self._allowances.check(repo_id, 1)
                self._create(repo_id, refs)
            else:
                self._update(copy, refs)
        except UpstreamError as error:
            self._remember(repo_id, _AFTER_FAILURE if copy is not None else 1.0)
            if copy is None:
                raise not_mirrored(f"{repo_id} was not copied: {error}") from None
            log.warning("the copy of %s may be old: %s", repo_id, error)
        else:
            self._remember(repo_id, seconds)

    def _create(self, repo_id: str, refs: Mapping[str, str]) -> None:
        def make(staging: Path) -> None:
            copy = GitRepository.create_mirror(repo_id, staging, self._upstream.url)
            self._upstream.fetch(repo_id, sorted(set(refs.values())), staging)
            check_objects(staging)
            _move(copy.refs, refs)

        try:
            self._repositories.add(repo_id, make)
        except Refusal:
            if repo_id not in self._repositories:  # else another server has just copied it
                raise

    def _update(self, copy: GitRepository, refs: Mapping[str, str]) -> None:
        if missing := sorted({commit for commit in refs.values() if not copy.refs.has_commit(commit)}):
            self._upstream.fetch(copy.repo_id, missing, copy.path)
        gone = [ref for ref in copy.refs if ref.full not in refs and ref.full != "refs/heads/main"]
        moved = {full: commit for full, commit in refs.items() if copy.refs.commit_of(full) != commit}
        if moved:  # also for commits that an earlier attempt fetched, and refused
            check_objects(copy.path)

        def change() -> None:
            with copy.refs.locked():
                _move(copy.refs, moved)

        for ref in gone:
            delete = copy.refs.delete_tag if ref.full.startswith("refs/tags/") else copy.refs.delete_branch
            patiently(lambda delete=delete, name=ref.name: delete(name))  # type: ignore[misc]
        if moved:
            patiently(change)


def _move(refs: GitRefs, targets: Mapping[str, str]) -> None:
    for full, commit in targets.items():
        try:
            names.ref_name(full.split("/", 2)[2])
            refs.move(full, commit, refs.commit_of(full))
        except Refusal as refusal:
            log.warning("%s of the other Hub is left out: %s", full, refusal.message)
