"""What to publish, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernel_builder.hub.remote_repository import Content


@dataclass(frozen=True)
class Request:
    """What to publish, and where.

    Attributes:
        directory: The project; its packages are in `build`.
        repo_id: None for that of `[general.hub]`.
        branch: None for that of `[general.hub]`, or else `v<version>`.
        private: Make the repository a private one, if it is new.
        create_pr: Open pull requests instead of committing.
        prune: Remove the variants on the branch that are not among the packages.
        card_note: A sentence for the card, such as how the packages were tested.
        dry_run: Do everything but write.
        message: The commits' first line.
        load: Load each package that this machine can load, as a check.
        endpoint: Address of the Hub. None: where the Hub's own tools find it.
        token: None: where they find it.
    """

    directory: Path
    repo_id: str | None = None
    branch: str | None = None
    private: bool = False
    create_pr: bool = False
    prune: bool = False
    card_note: str | None = None
    dry_run: bool = False
    message: str | None = None
    load: bool = True
    endpoint: str | None = None
    token: str | None = None


class Listener:
    """Told how a publication goes along. The default says nothing."""

    def say(self, message: str) -> None:
        """Something a person would want to know, one line."""


@dataclass(frozen=True)
class Change:
    """What brings one branch to what it should be.

    Attributes:
        add: Path in the repository -> what to send.
        size: Bytes of the different contents among them.
        unchanged: How many files are there already.
        delete: Paths to remove.
    """

    add: Mapping[str, Content]
    size: int
    unchanged: int
    delete: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.add or self.delete)


@dataclass(frozen=True)
class Written:
    """What was, or would be, done to one branch. `revision` and `url` are those of a commit, if one was made."""

    branch: str
    sent: tuple[str, ...] = ()
    bytes: int = 0
    unchanged: int = 0
    removed: tuple[str, ...] = ()
    revision: str | None = None
    url: str | None = None
    pull_request: str | None = None


@dataclass(frozen=True)
class Published:
    """What a publication did.

    Attributes:
        variants: The variants published.
        kept: Variants on the branch that this publication leaves as they are.
        removed: Variants that it removes.
        dirty: Of `variants` and `kept`, those built from sources, or by a builder, that no commit has.
        api_changes: How the API differs from that of the variants that were on the branch.
        builds, main: What was done to the two branches. `main` is None if it belongs to a newer version.
        note: Why `main` was left as it is.
    """

    repo_id: str
    endpoint: str
    url: str
    version: int
    dry_run: bool
    created: bool
    variants: tuple[str, ...]
    kept: tuple[str, ...]
    removed: tuple[str, ...]
    dirty: tuple[str, ...]
    api_changes: tuple[str, ...]
    builds: Written
    main: Written | None
    note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The result as `--output-json` prints it."""

        def spelled(fields: list[tuple[str, Any]]) -> dict[str, Any]:
            return {key.replace("_", "-"): value for key, value in fields}

        return asdict(self, dict_factory=spelled)
