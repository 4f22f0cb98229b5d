"""The settings of a Hub, as its command line sets them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request. A request that exceeds one is refused, with the limit in the error."""

    file_bytes: int = 50 << 30  # the largest file
    small_file_bytes: int = 1 << 20  # the largest text file in git; other files are stored as large files
    inline_file_bytes: int = 512 << 20  # the largest file that a commit may carry in its own body
    metadata_bytes: int = 1 << 20  # the largest `metadata.json`: every loader parses it
    commit_bytes: int = 2 << 30  # the largest body of a commit
    commit_changes: int = 25_000  # the most changes of a commit
    pull_requests: int = 32  # the most pull requests in one repository by a token without write access
    list_bytes: int = 1 << 20  # the largest list of files or objects: Python's JSON parser stops all threads
    body_bytes: int = 128 << 10  # the largest body of any other request
    bodies_bytes: int = 128 << 20  # of other bodies, and changes of commits, in memory; if it is full, callers share it
    small_body_bytes: int = 64 << 10  # the largest body that is held whatever the others of its caller or address
    body_seconds: float = 60.0  # the timeout of another body
    idle_seconds: float = 30.0  # the longest time without data in a body


@dataclass(frozen=True)
class Settings:
    """The repositories that a Hub serves, and their readers and writers.

    Args:
        root: The directory of the Hub.
        token_file: The tokens and their scopes. None: any token may write.
        read_only: Whether to refuse every change.
        trusted: Organizations whose kernels load without `trust_remote_code`.
        limits: Limits of one request.
        quota_bytes: The most bytes that the Hub stores. A large file counts in each repository that it was uploaded to.
        reserve_bytes: The free space that uploads leave on the disk, but at most a twentieth of the disk.
        audit_log: The file of the audit log; `-` is stdout. None: no audit log.
    """

    root: Path
    token_file: Path | None = None
    read_only: bool = False
    trusted: frozenset[str] = frozenset()
    limits: RequestLimits = field(default_factory=RequestLimits)
    quota_bytes: int | None = None
    reserve_bytes: int = 1 << 30
    audit_log: str | None = None
