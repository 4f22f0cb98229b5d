"""The settings of a Hub, as its command line sets them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request. A request that exceeds one is refused with its name, before it is read."""

    file_bytes: int = 50 << 30
    """The largest file."""
    small_file_bytes: int = 1 << 20
    """Files up to this size are kept in git, if they are text."""
    inline_file_bytes: int = 10 << 20
    """The largest file that a commit may carry in its own body."""
    metadata_bytes: int = 1 << 20
    """The largest `metadata.json`: every loader parses it."""
    commit_bytes: int = 1 << 30
    """The largest body of a commit."""
    commit_changes: int = 25_000
    """The most changes of a commit."""
    pull_requests: int = 32
    """The most pull requests in one repository of a token that may not write there."""
    body_bytes: int = 8 << 20
    """The largest body of any other request."""
    bodies_bytes: int = 64 << 20
    """The largest sum of other bodies in memory at once."""
    body_seconds: float = 60.0
    """The longest time in which another body may arrive."""
    strangers_body_bytes: int = 1 << 20
    """The largest body of a request without a token of this Hub."""
    strangers_bodies_bytes: int = 8 << 20
    """The largest sum of bodies without a token in memory at once."""
    front_matter_bytes: int = 64 << 10
    """The largest front matter of a card."""
    uploads: int = 128
    """Large files that are received at once; further clients are told to retry."""
    commits: int = 64
    """Commits that are received at once. Counted apart from files, so that slow uploads do not block commits."""
    clones: int = 8
    """Clones that are served at once, each by processes of git."""
    idle_seconds: float = 30.0
    """The longest time without data in a body or in the head of a request."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections, and of the heads of requests."""

    connections: int = 8192
    """The most connections."""
    connections_by_address: int = 512
    """The most connections of one address that is not a proxy's."""
    head_bytes: int = 32 << 10
    """The largest head of a request."""
    url_bytes: int = 8 << 10
    """The longest address."""
    headers: int = 100
    """The most lines of a head."""
    waiting_requests: int = 16
    """The most requests that a client sends on a connection before it has the answer to the first."""


@dataclass(frozen=True)
class Quotas:
    """The most bytes that are stored. A large file counts in each repository that it was uploaded to."""

    repository_bytes: int | None = None
    organization_bytes: int | None = None
    server_bytes: int | None = None
    reserve_bytes: int = 1 << 30
    """What uploads leave free on the disk, but at most a twentieth of it."""


@dataclass(frozen=True)
class MirrorSettings:
    """What a Hub copies from another one, when it is asked for.

    Args:
        url: The address of the other Hub.
        organizations: The organisations whose kernels are copied. Names of no others are sent to the other Hub.
        refresh_seconds: How long branches and tags are served before the other Hub is asked again.
        signers: Who may sign, as `verify --signer` takes them. Empty: the workflows that the public client trusts.
        require_signatures: Whether packages without a signature are refused.
    """

    url: str
    organizations: frozenset[str]
    refresh_seconds: float = 300.0
    signers: tuple[str, ...] = ()
    require_signatures: bool = False


@dataclass(frozen=True)
class Settings:
    """What a Hub serves, and to whom.

    Args:
        root: The directory of the Hub.
        large_files: A directory or an fsspec URL for the large files. None: a directory in `root`.
        token_file: The tokens and their scopes. None: any token may write.
        read_only: Whether to refuse every change.
        trusted: Organisations whose kernels load without `trust_remote_code`.
        limits: Limits of one request.
        connections: Limits of connections.
        quotas: Limits of what is stored.
        audit_log: The file of the audit log; `-` is stdout. None: there is none.
        mirror: What is copied from another Hub. None: nothing.
    """

    root: Path
    large_files: str | None = None
    token_file: Path | None = None
    read_only: bool = False
    trusted: frozenset[str] = frozenset()
    limits: RequestLimits = field(default_factory=RequestLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    quotas: Quotas = field(default_factory=Quotas)
    audit_log: str | None = None
    mirror: MirrorSettings | None = None
