"""How a Hub was started."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. More is refused by name, before it is read."""

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
    body_bytes: int = 8 << 20
    """The largest body of any other request."""
    bodies_bytes: int = 64 << 20
    """All of those at once."""
    body_seconds: float = 60.0
    """How long one of those may take."""
    strangers_body_bytes: int = 1 << 20
    """The largest body of a request without a token of this Hub."""
    strangers_bodies_bytes: int = 8 << 20
    """All of those at once."""
    front_matter_bytes: int = 64 << 10
    """The largest front matter of a card."""
    uploads: int = 128
    """Files that are received at once; more are asked to wait."""
    commits: int = 64
    """Commits that are received at once, so that files that come slowly are in no commit's way."""
    idle_seconds: float = 30.0
    """How long a body, or the head of a request, may stop coming."""


@dataclass(frozen=True)
class Settings:
    """What a Hub serves and to whom.

    Args:
        root: The directory that holds everything but, perhaps, the large files.
        large_files: Where the large files are, as fsspec reads it; by default a directory in `root`.
        token_file: Who may do what; None where any token may write.
        read_only: Whether every change is refused.
        trusted: The organisations whose kernels load without `trust_remote_code`.
        limits: What one request may ask for.
    """

    root: Path
    large_files: str | None = None
    token_file: Path | None = None
    read_only: bool = False
    trusted: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)
