"""The Hub behind the routes: what it holds, and who may do what with it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from kernel_builder.server import names
from kernel_builder.server.blobs import Blobs, sync_directory
from kernel_builder.server.git_repository import Repository
from kernel_builder.server.large_files import Incoming, LargeFiles
from kernel_builder.server.locks import file_lock
from kernel_builder.server.refusals import Refusal, no_repository, read_only, wrong_token
from kernel_builder.server.repository_store import Repositories
from kernel_builder.server.settings import Settings
from kernel_builder.server.tokens import Caller, OpenDoor, TokenFile

SIGNATURE_SECONDS = 3600


class Hub:
    """What is served: repositories, large files, and permissions.

    repositories/<organisation>/<name>.git
    large/<aa>/<bb>/<sha256>      unless the large files are elsewhere
    incoming/                     what is still being uploaded to this machine
    secret                        signs upload addresses; shared by all servers of this root
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.root = settings.root
        self.root.mkdir(parents=True, exist_ok=True)
        self.repositories = Repositories(self.root / "repositories")
        incoming = self.root / "incoming"
        large = settings.large_files.rstrip("/") if settings.large_files else str(self.root / "large")
        self.large_files = LargeFiles(Blobs(large, incoming))
        self.xorbs = Blobs(f"{large}-xorbs", incoming)
        self.doors = TokenFile(settings.token_file) if settings.token_file else OpenDoor()
        self._secret = _secret(self.root / "secret")

    def caller(self, authorization: str | None) -> Caller:
        """Who sends this `Authorization` header: a token, or a token as the password of any name."""
        scheme, _, sent = (authorization or "").partition(" ")
        token = None
        if scheme.lower() == "bearer":
            token = sent.strip()
        elif scheme.lower() == "basic":
            try:
                token = base64.b64decode(sent, validate=True).decode().partition(":")[2]
            except ValueError:
                raise wrong_token() from None
        return self.doors.caller(token)

    def is_known(self, authorization: str) -> bool:
        """Whether this `Authorization` header is that of a caller with a name."""
        try:
            return bool(self.caller(authorization).name)
        except Refusal:
            return False

    def to_read(self, repo_id: str, caller: Caller) -> Repository:
        """A repository, if it exists for this caller."""
        repository = self.repositories.open(repo_id)
        if repository.private and not caller.may_see(repo_id.partition("/")[0]):
            raise no_repository(repo_id)
        return repository

    def to_write(self, repo_id: str, caller: Caller) -> Repository:
        """A repository, if this caller may change it."""
        repository = self.to_read(repo_id, caller)
        self.must_write(repo_id.partition("/")[0], caller)
        return repository

    def must_write(self, organization: str, caller: Caller) -> None:
        """Refuse unless this caller may publish in the organisation."""
        if self.settings.read_only:
            raise read_only()
        caller.must_write(organization)

    def visible(self, caller: Caller) -> list[Repository]:
        """The repositories that exist for this caller."""
        found = []
        for repo_id in self.repositories:
            try:
                found.append(self.to_read(repo_id, caller))
            except Refusal:
                continue
        return found

    def keeping(self, *, alone: bool = False) -> AbstractContextManager[None]:
        """Held while a large file enters the store and is noted as a repository's own; alone, while unowned ones go."""
        return file_lock(self.root / "lock", "the store of large files", shared=not alone)

    def keep(self, repository: Repository, incoming: Sequence[Incoming]) -> None:
        """Store sealed files as large files of a repository, durably."""
        with self.keeping():
            self.large_files.adopt(incoming)
            repository.own(file.sha256 for file in incoming)

    # The clients send a file to the address that they are given, without their token.

    def sign(self, action: str, repo_id: str, sha256: str, size: int) -> str:
        """The query of an address at which one large file of one repository may be sent or read for an hour."""
        expires = int(time.time()) + SIGNATURE_SECONDS
        return f"size={size}&expires={expires}&signature={self._signature(action, repo_id, sha256, size, expires)}"

    def check_signature(self, action: str, repo_id: str, sha256: str, size: int, expires: int, signature: str) -> None:
        """Refuse unless we signed this, and not too long ago."""
        expected = self._signature(action, repo_id, names.sha256(sha256), size, expires)
        if not hmac.compare_digest(expected.encode(), signature.encode()) or expires < time.time():
            raise Refusal(403, "this address is not one of this Hub, or has expired; start again", code="BadSignature")

    def _signature(self, action: str, repo_id: str, sha256: str, size: int, expires: int) -> str:
        return self.signature("\n".join((action, repo_id, sha256, str(size), str(expires))).encode())

    def signature(self, what: bytes) -> str:
        """Our signature of these bytes, the same on every server of this root."""
        return hmac.new(self._secret, what, hashlib.sha256).hexdigest()


def _secret(path: Path) -> bytes:
    """The secret of this root, made by whichever server comes first."""
    if not path.exists():
        staging = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(staging, path)
        except FileExistsError:
            pass
        finally:
            staging.unlink()
        sync_directory(path.parent)
    return path.read_bytes()
