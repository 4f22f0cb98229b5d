"""The state behind the routes: repositories, large files and permissions."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import pygit2

from kernel_format.files import locked, write_atomically
from kernel_hub import names
from kernel_hub.git.blob_spool import BlobSpool
from kernel_hub.git.repository import GitRepository
from kernel_hub.mirror.copies import Mirror
from kernel_hub.refusals import (
    Moved,
    Refusal,
    mirrored,
    no_repository,
    no_token,
    not_mirrored,
    read_only,
    wrong_token,
)
from kernel_hub.repositories.allowances import Allowances
from kernel_hub.repositories.index import IndexedRepository, RepositoryIndex
from kernel_hub.repositories.reader import read_repository
from kernel_hub.repositories.store import RepositoryStore
from kernel_hub.settings import Settings
from kernel_hub.storage.blobs import Blobs, sync_directory
from kernel_hub.storage.large_files import IncomingFile, LargeFiles
from kernel_hub.storage.locks import StoreLock
from kernel_hub.tokens import AnyToken, Caller, TokenFile

SIGNATURE_SECONDS = 3600


class Hub:
    """The directory of a Hub, and who may do what in it.

    repositories/<organisation>/<name>.git
    large/<aa>/<bb>/<sha256>      unless --large-files names another store
    large-xorbs/<organisation>/   containers of Xet uploads
    incoming/                     uploads in progress
    secret                        signs upload addresses; shared by all servers of this root
    index.sqlite                  what lists need of all repositories; made from them
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.root = settings.root
        self.root.mkdir(parents=True, exist_ok=True)
        self.index = RepositoryIndex(self.root / "index.sqlite", self._indexed)
        self.repositories = RepositoryStore(self.root / "repositories", self.index)
        incoming = self.root / "incoming"
        large = settings.large_files.rstrip("/") if settings.large_files else str(self.root / "large")
        self.large_files = LargeFiles(Blobs(large, incoming))
        self.xorbs = Blobs(f"{large}-xorbs", incoming)
        self.spool = BlobSpool(incoming)
        self.tokens = TokenFile(settings.token_file) if settings.token_file else AnyToken()
        self.store_lock = StoreLock(self.root / "lock")
        self._secret = _secret(self.root / "secret")
        self.allowances = Allowances(settings.quotas, self.index, incoming)
        self.mirror = (
            Mirror(settings.mirror, self.repositories, self.large_files, self.allowances, self.keep)
            if settings.mirror
            else None
        )
        self.index.prepare(lambda: self.repositories, self.xorbs.sizes)

    def _indexed(self, repo_id: str, known: IndexedRepository | None) -> IndexedRepository | None:
        """Read a repository for the index. One that cannot be read is not listed; `hub check` names it."""
        try:
            return read_repository(self.repositories.open(repo_id), self.large_files, known)
        except (Refusal, pygit2.GitError, KeyError, ValueError, OSError):
            return None

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller of an `Authorization` header, which holds a token as bearer or as basic password.

        Raises:
            Refusal: If the Hub does not know the token.
        """
        scheme, _, sent = (authorization or "").partition(" ")
        token = None
        if scheme.lower() == "bearer":
            token = sent.strip()
        elif scheme.lower() == "basic":
            try:
                token = base64.b64decode(sent, validate=True).decode().partition(":")[2]
            except ValueError:
                raise wrong_token() from None
        return self.tokens.caller(token)

    def is_known(self, authorization: str) -> bool:
        """Return whether an `Authorization` header holds a token of this Hub."""
        try:
            return bool(self.caller(authorization).name)
        except Refusal:
            return False

    def to_read(self, repo_id: str, caller: Caller) -> GitRepository:
        """Open a repository that this caller may see.

        Raises:
            Moved: If it has another name now.
            Refusal: If there is none.
        """
        try:
            repository = self.repositories.open(repo_id)
        except Refusal:
            if (target := self.moved_to(repo_id, caller)) is not None:
                raise Moved(repo_id, target) from None
            raise
        if repository.private and not caller.may_see(repo_id):
            raise no_repository(repo_id, hidden=True)
        if self.mirror is None and (url := repository.mirror_of) is not None:
            raise not_mirrored(f"{repo_id} is a copy from {url}, and this Hub was started without --mirror")
        return repository

    def moved_to(self, repo_id: str, caller: Caller) -> str | None:
        """Return the new name of a repository that this caller may see, and that had this name before."""
        if (target := self.repositories.moved_to(repo_id)) is None:
            return None
        repository = self.repositories.open(target)
        return None if repository.private and not caller.may_see(target) else target

    def to_write(self, repo_id: str, caller: Caller) -> GitRepository:
        """Open a repository that this caller may change.

        Raises:
            Refusal: If there is none, or the caller may not.
        """
        repository = self.to_manage(repo_id, caller)
        if (url := repository.mirror_of) is not None:
            raise mirrored(repo_id, url)
        return repository

    def to_propose(self, repo_id: str, caller: Caller) -> GitRepository:
        """Open a repository for which this caller may open a pull request: any that a token lets it see.

        Raises:
            Refusal: If there is none, or the caller may not.
        """
        repository = self.to_read(repo_id, caller)
        if self.settings.read_only:
            raise read_only()
        if not caller.name:
            raise no_token(f"a pull request for {repo_id} needs a token: pass token=… or set HF_TOKEN")
        if (url := repository.mirror_of) is not None:
            raise mirrored(repo_id, url)
        return repository

    def to_commit(self, repo_id: str, caller: Caller, revision: str, *, create_pr: bool) -> GitRepository:
        """Open a repository in which this caller may make a commit: by a pull request, its own, or a token to write.

        Raises:
            Refusal: If there is none, or the caller may not.
        """
        if not create_pr and not caller.may_write(repo_id):
            repository = self.to_propose(repo_id, caller) if revision.startswith("refs/pr/") else None
            if repository is not None and repository.commits.opened_by(revision) == caller.name:
                return repository
        return self.to_propose(repo_id, caller) if create_pr else self.to_write(repo_id, caller)

    def to_manage(self, repo_id: str, caller: Caller) -> GitRepository:
        """Open a repository that this caller may delete. It may be a copy of another Hub's.

        Raises:
            Refusal: If there is none, or the caller may not.
        """
        repository = self.to_read(repo_id, caller)
        self.must_write(repo_id, caller)
        return repository

    def must_write(self, repo_id: str, caller: Caller) -> None:
        """Raise a refusal unless this caller may publish in the repository, which need not exist."""
        if self.settings.read_only:
            raise read_only()
        caller.must_write(repo_id)

    def keep(self, repository: GitRepository, incoming: Sequence[IncomingFile]) -> None:
        """Store sealed uploads as large files of a repository, durably."""
        with self.store_lock.storing():
            added = sum(file.size for file in incoming if file.sha256 not in repository.owned)
            self.large_files.adopt(incoming)
            repository.owned.add(file.sha256 for file in incoming)
        if added:
            self.index.grow(repository.repo_id, added)

    # Clients send large files to signed addresses, without their token.

    def sign(self, action: str, repo_id: str, sha256: str, size: int, caller: Caller) -> str:
        """Return the query of an address at which one large file may be uploaded or downloaded for an hour."""
        expires = int(time.time()) + SIGNATURE_SECONDS
        signature = self._signature(action, repo_id, sha256, size, expires, caller.key)
        return f"size={size}&expires={expires}&by={caller.key}&signature={signature}"

    def check_signature(
        self, action: str, repo_id: str, sha256: str, size: int, expires: int, by: str, signature: str
    ) -> Caller:
        """Return the caller to whom this Hub gave the address within the last hour.

        Raises:
            Refusal: If it did not, or the caller's token was removed meanwhile.
        """
        expected = self._signature(action, repo_id, names.sha256(sha256), size, expires, by)
        if not hmac.compare_digest(expected.encode(), signature.encode()) or expires < time.time():
            raise Refusal(
                403, "this Hub did not sign this address, or it has expired; request a new one", code="BadSignature"
            )
        return self.caller_by_key(by)

    def caller_by_key(self, key: str) -> Caller:
        """Return the caller to whom this Hub gave a signed address.

        Raises:
            Refusal: If the caller's token was removed meanwhile.
        """
        return self.tokens.caller_by_key(key)

    def _signature(self, action: str, repo_id: str, sha256: str, size: int, expires: int, by: str) -> str:
        return self.signature("\n".join((action, repo_id, sha256, str(size), str(expires), by)).encode())

    def signature(self, what: bytes) -> str:
        """Return the signature of these bytes, which is the same on every server of this root."""
        return hmac.new(self._secret, what, hashlib.sha256).hexdigest()


def _secret(path: Path) -> bytes:
    """Return the secret of this root; the first server creates it."""
    if not path.exists():
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                write_atomically(path, secrets.token_bytes(32), mode=0o600)
                sync_directory(path.parent)
    return path.read_bytes()
