"""The repositories of a Hub: opened, listed, created, renamed and deleted."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pygit2

from kernel_hub import names
from kernel_hub.git.repository import GitRepository
from kernel_hub.refusals import Refusal, bad_request, conflict, no_repository
from kernel_hub.repositories.index import RepositoryIndex
from kernel_hub.storage.disk import exclusive_lock, private_directory, repository_lock, sync_filesystem
from kernel_hub.storage.large_files import LargeFiles

_ROUTES = {"api", "health", "kernels", "login", "logout", "metrics", "openapi.json"}


class RepositoryStore:
    """The repositories below a directory: `<organization>/<name>.git`.

    A repository appears and disappears by a rename. Names that begin with a dot are locks, and repositories that are
    being created or deleted.
    """

    def __init__(self, root: Path, index: RepositoryIndex, large_files: LargeFiles, staging: Path) -> None:
        self.root = root
        self._large_files = large_files
        self._staging = staging
        self._index = index
        private_directory(root)

    def _path(self, repo_id: str) -> Path:
        return self.root / f"{names.checked(repo_id)}.git"

    def open(self, repo_id: str) -> GitRepository:
        """Open a repository, without a check of permissions, or raise a refusal if there is none."""
        path = self._path(repo_id)
        try:
            return GitRepository(repo_id, path, self._index.changing, self._index.grow, self._staging)
        except pygit2.GitError:
            if path.is_dir():
                raise
            raise no_repository(repo_id) from None

    def __iter__(self) -> Iterator[str]:
        """The ids of all repositories, sorted."""
        return (f"{path.parent.name}/{path.stem}" for path in sorted(self.root.glob("[!.]*/[!.]*.git")))

    @contextmanager
    def _naming(self, repo_id: str, besides: str = "") -> Iterator[None]:
        """Refuse a name that some file systems of clients take for another repository's; keep it from others."""
        if (organization := repo_id.partition("/")[0].lower()) in _ROUTES:
            raise bad_request(f"{organization!r} is an address of the Hub and cannot be an organization")
        with exclusive_lock(self.root / ".names.lock", "the names of repositories"):
            if (twin := self._index.twin(repo_id)) and twin != besides:
                raise conflict(f"{repo_id} would differ from {twin} in case only")
            with self._index.changing(repo_id):
                yield

    def create(self, repo_id: str, *, private: bool, author: str) -> None:
        """Create a repository, whole or not at all."""
        path = self._path(repo_id)
        existing = conflict(f"You already created this kernel repo: {repo_id} exists")
        if path.is_dir():
            raise existing
        path.parent.mkdir(exist_ok=True)
        sync_filesystem(self.root)
        new = path.parent / f".new-{uuid.uuid4().hex}"
        try:
            private_directory(new)
            GitRepository.create(repo_id, new, private=private, author=author)
            with self._naming(repo_id):
                if path.is_dir():  # just created
                    raise existing
                new.rename(path)
                sync_filesystem(path.parent)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def delete(self, repo_id: str) -> None:
        """Delete a repository, and the large files that only this repository owned: no quota counts them any more."""
        path = self._path(repo_id)
        self.open(repo_id)
        trash = path.parent / f".deleted-{uuid.uuid4().hex}"
        with self._index.changing(repo_id):
            with repository_lock(path, repo_id), self._large_files.locked():
                path.rename(trash)
                sync_filesystem(path.parent)
            with suppress(Refusal):  # no lock is free: `kernel-hub gc` frees the files
                self._free({marker.name for marker in (trash / "large").glob("*")})
            shutil.rmtree(trash, ignore_errors=True)

    def unmoved(self) -> AbstractContextManager[None]:
        """Keep repositories at their paths, so that a search for the owners of files misses none."""
        return exclusive_lock(self.root / ".moves.lock", "the paths of repositories")

    def _free(self, sha256s: set[str]) -> None:
        """Delete the large files that no repository owns. Uploads do not wait for the search, but change a stamp."""
        stamps = {sha256: self._large_files.stamp(sha256) for sha256 in sha256s}
        with self.unmoved():
            for other in self if sha256s else ():
                with suppress(FileNotFoundError), os.scandir(f"{self.root}/{other}.git/large") as markers:
                    sha256s -= {marker.name for marker in markers}
        for sha256 in sha256s:
            self._large_files.remove(sha256, stamps[sha256])

    def move(self, source: str, target: str) -> None:
        """Rename a repository."""
        old, new = self._path(source), self._path(target)
        new.parent.mkdir(exist_ok=True)
        self.open(source)
        with repository_lock(old, source), self._index.changing(source), self._naming(target, besides=source):
            if new.exists():
                raise conflict(f"{target} exists")
            with self.unmoved():
                self._index.rename(source, target)
                old.rename(new)
            sync_filesystem(new.parent)
            sync_filesystem(old.parent)
