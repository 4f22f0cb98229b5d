"""The state behind the routes: repositories, large files and permissions."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pygit2

from kernel_format.files import locked, write_atomically
from kernel_hub import names
from kernel_hub.git.repository import GitRepository
from kernel_hub.refusals import Refusal, forbidden, no_repository, no_token, wrong_token
from kernel_hub.repositories.index import Allowances, IndexedRepository, RepositoryIndex
from kernel_hub.repositories.reader import read_repository, stored_bytes
from kernel_hub.repositories.store import RepositoryStore
from kernel_hub.settings import Settings
from kernel_hub.storage.disk import BLOCK, check_caller, occupied, private_directory, sync_filesystem
from kernel_hub.storage.large_files import IncomingFile, LargeFiles
from kernel_hub.tokens import AnyToken, Caller, TokenFile

SIGNATURE_SECONDS = 3600
_PORTION = 100  # of files that are stored while other uploads wait
UNREADABLE = (pygit2.GitError, KeyError, ValueError, OSError)  # errors of a damaged repository


class Hub:
    """The directory of a Hub, whose files docs/hub.md lists, and the permissions of its callers.

    A server with `--read-only` whose root cannot be written has `incoming`, `secret` and its index elsewhere.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.root = settings.root
        private_directory(self.root)
        own = self.root
        if settings.read_only and not os.access(self.root, os.W_OK):  # as on a read-only file system
            self._own = tempfile.TemporaryDirectory(prefix="kernel-hub-")
            own = Path(self._own.name)
        incoming = own / "incoming"
        self.index = RepositoryIndex(own / "index.sqlite", self._indexed)
        self.large_files = LargeFiles(self.root / "large", incoming)
        self.repositories = RepositoryStore(self.root / "repositories", self.index, self.large_files, incoming)
        self.tokens = TokenFile(settings.token_file) if settings.token_file else AnyToken()
        self._secret = _secret(own / "secret")
        self.allowances = Allowances(settings.quota_bytes, settings.reserve_bytes, self.index, incoming)

    def _indexed(self, repo_id: str, known: IndexedRepository | None, measure: bool) -> IndexedRepository | None:
        """Read a repository for the index. A damaged one, which `kernel-hub check` reports, keeps its old entry."""
        try:
            return read_repository(self.repositories.open(repo_id), self.large_files, None if measure else known)
        except (Refusal, *UNREADABLE):
            if not (path := self.repositories.root / f"{repo_id}.git").is_dir():
                return None
            if measure or known is None:
                known = known or IndexedRepository(repo_id, repo_id.partition("/")[0], private=True)
                known = replace(known, bytes=stored_bytes(path, self.large_files))
            return known

    def check(self) -> None:
        """Read the root, the tokens and the index; raises if that fails."""
        self.repositories.root.stat()
        self.tokens.caller_by_key("")
        self.index.is_public("")

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller of an `Authorization` header, which holds a token as bearer or as basic password.

        Raises:
            Refusal: If the Hub does not know the token, or the header is empty.
        """
        if authorization is None:
            return Caller()
        scheme, _, sent = authorization.partition(" ")
        token = sent.strip() if scheme.lower() == "bearer" else ""
        if scheme.lower() == "basic":
            with suppress(ValueError):
                token = base64.b64decode(sent, validate=True).decode().partition(":")[2]
        if not token:  # requests with the header have threads that anonymous requests do not get
            raise wrong_token()
        return self.tokens.caller(token)

    # `to_…` raises a refusal if there is no such repository, or if the caller lacks the permission.

    def to_read(self, repo_id: str, caller: Caller) -> GitRepository:
        """Open a repository that this caller may see."""
        # Without a scope, the same work for a private repository as for a missing one, so that times are equal.
        if not caller.may_see(repo_id) and not self.index.is_public(repo_id):
            raise no_repository(repo_id, hidden=True)
        repository = self.repositories.open(repo_id)
        if repository.private and not caller.may_see(repo_id):
            raise no_repository(repo_id, hidden=True)
        return repository

    def to_write(self, repo_id: str, caller: Caller) -> GitRepository:
        """Open a repository that this caller may change."""
        repository = self.to_read(repo_id, caller)
        self.must_write(repo_id, caller)
        return repository

    def to_add(self, repo_id: str, caller: Caller) -> GitRepository:
        """Open a repository that this caller may change, unless a small file would exceed the quota."""
        repository = self.to_write(repo_id, caller)
        self.allowances.check(BLOCK)
        return repository

    def to_propose(self, repo_id: str, caller: Caller) -> GitRepository:
        """Open a repository for which this caller may open a pull request: any that a token lets it see."""
        repository = self.to_read(repo_id, caller)
        self._must_be_writable(caller)
        if not caller.name:
            raise no_token(f"a pull request for {repo_id} needs a token: pass token=… or set HF_TOKEN")
        return repository

    def to_commit(self, repo_id: str, caller: Caller, revision: str, *, create_pr: bool) -> GitRepository:
        """Open a repository in which this caller may make a commit: by a pull request, its own, or a token to write."""
        if create_pr:
            return self.to_propose(repo_id, caller)
        if revision.startswith("refs/pr/") and not caller.may_write(repo_id):
            repository = self.to_propose(repo_id, caller)
            if repository.commits.opened_by(revision) == caller.name:
                return repository
        return self.to_write(repo_id, caller)

    def must_write(self, repo_id: str, caller: Caller) -> None:
        """Raise a refusal unless this caller may publish in the repository, which need not exist."""
        self._must_be_writable(caller)
        if not caller.name:
            raise no_token(f"writing to {repo_id} needs a token: pass token=… or set HF_TOKEN")
        if not caller.may_write(repo_id):
            denied = "may only read" if caller.may_see(repo_id) else "has no write scope for"
            raise forbidden(f"the token {caller.name!r} {denied} {repo_id}")

    def _must_be_writable(self, caller: Caller) -> None:
        if self.settings.read_only:
            raise Refusal(403, "this Hub is read-only", code="ReadOnly")
        check_caller.set(partial(self.tokens.caller_by_key, caller.key))

    def keep(self, repository: GitRepository, incoming: Sequence[IncomingFile]) -> None:
        """Store sealed uploads as large files of a repository, durably, if it still exists."""
        for start in range(0, len(incoming), _PORTION):
            portion = incoming[start : start + _PORTION]
            with self.large_files.locked():
                if not repository.path.is_dir():
                    raise no_repository(repository.repo_id)
                new = {file.sha256: file.size for file in portion if file.sha256 not in repository.owned}
                self.index.grow(repository.repo_id, sum(occupied(size) + BLOCK for size in new.values()))
                repository.owned.add(file.sha256 for file in portion)  # first: no quota counts a file without an owner
                self.large_files.adopt(portion)
        for root in (self.repositories.root, self.root / "large"):
            sync_filesystem(root)

    # Clients send large files to signed addresses, without their token.

    def sign(self, action: str, repo_id: str, sha256: str, size: int, caller: Caller) -> str:
        """Return the query of an address at which one large file may be uploaded or downloaded for an hour."""
        return self._signed(action, repo_id, sha256, size, int(time.time()) + SIGNATURE_SECONDS, caller.key)

    def check_signature(
        self, action: str, repo_id: str, sha256: str, size: int, expires: int, by: str, signature: str
    ) -> Caller:
        """Return the caller to whom this Hub gave the address within the last hour.

        Raises:
            Refusal: If it did not, or the caller's token was removed meanwhile.
        """
        expected = self._signed(action, repo_id, names.sha256(sha256), size, expires, by).rpartition("=")[2]
        if not hmac.compare_digest(expected.encode(), signature.encode()) or expires < time.time():
            message = "this Hub did not sign this address, or it has expired; request a new one"
            raise Refusal(403, message, code="BadSignature")
        return self.tokens.caller_by_key(by)

    def _signed(self, action: str, repo_id: str, sha256: str, size: int, expires: int, by: str) -> str:
        message = "\n".join((action, repo_id, sha256, str(size), str(expires), by))
        signature = hmac.new(self._secret, message.encode(), hashlib.sha256).hexdigest()
        return f"size={size}&expires={expires}&by={by}&signature={signature}"


def _secret(path: Path) -> bytes:
    """Return the secret of this root; the first server creates it."""
    if not path.exists():
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                write_atomically(path, secrets.token_bytes(32), mode=0o600)
                sync_filesystem(path.parent)
    return path.read_bytes()
