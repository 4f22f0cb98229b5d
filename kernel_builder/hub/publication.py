"""What to publish, and the result of a publication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernel_builder.hub.remote_repository import Content


@dataclass(frozen=True)
class PublishRequest:
    """What to publish, and where.

    Attributes:
        directory: The project; its packages are in `build`.
        repo_id: The repository. None: that of `[general.hub]`, with the owner if one is given. `ORG/` gives the owner.
        owner: Who publishes the project and the kernels of the same owner that it loads. None: as `build.toml` says.
        branch: The branch of the builds. None: that of `[general.hub]`, or else `v<version>`.
        private: Make the repository private, if it is created.
        create_pr: Open pull requests instead of committing to the branches.
        prune: Delete the variants on the branch that are not among the packages.
        card_note: A sentence for the card, such as how the packages were tested.
        dry_run: Check and compare only; write nothing.
        message: The first line of the commits. None: one that names the project and its version.
        load: Check that each package loads, if this machine can load it.
        allow: Names of checks whose errors do not stop the publication.
        untested: Publish also packages whose metadata says that nothing like them has run on its hardware.
        take_over: Publish even if the packages of the repository come from other sources.
        allow_api_change: Why an API that breaks callers may replace the published one of the same version. None: it
            may not.
        endpoint: The address of the Hub. None: the one that the Hub's own tools use.
        token: The token. None: the one that the Hub's own tools use.
    """

    directory: Path
    repo_id: str | None = None
    owner: str | None = None
    branch: str | None = None
    private: bool = False
    create_pr: bool = False
    prune: bool = False
    card_note: str | None = None
    dry_run: bool = False
    message: str | None = None
    load: bool = True
    allow: tuple[str, ...] = ()
    untested: bool = False
    take_over: bool = False
    allow_api_change: str | None = None
    endpoint: str | None = None
    token: str | None = None

    @property
    def new_owner(self) -> str | None:
        """Who publishes, if not the owner that `build.toml` names."""
        return self.repo_id[:-1] if self.repo_id and self.repo_id.endswith("/") else self.owner


@dataclass(frozen=True)
class BranchChange:
    """The difference between a branch and its wanted content.

    Attributes:
        add: Path in the repository -> content to upload.
        size: Size in bytes of the distinct contents in `add`.
        unchanged: Number of files that the branch has already.
        delete: Paths to delete.
        inherited: Those of `delete` that the branch only has because a Hub starts a branch as a copy of `main`.
    """

    add: Mapping[str, Content]
    size: int
    unchanged: int
    delete: tuple[str, ...]
    inherited: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.add or self.delete)


@dataclass(frozen=True)
class BranchResult:
    """What was, or in a dry run would be, done to one branch. `revision` and `url` are of the commit, if any."""

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
    """The result of a publication.

    Attributes:
        variants: The published variants.
        kept: Variants on the branch that this publication does not touch.
        removed: Variants that it deletes.
        dirty: Those of `variants` and `kept` whose sources or builder had uncommitted changes.
        without_commit: Those of `variants` and `kept` whose sources are in no commit, so that nobody can verify them.
        not_loaded: Those of `variants` that this machine has not loaded, and why.
        left_out: Packages that are not published, and why.
        api_changes: Differences of the API from that of the variants that were on the branch.
        builds: What was done to the branch of the builds.
        main: What was done to `main`. None if `main` belongs to a newer version.
        note: Why `main` was left unchanged, if it was.
        card_findings: What the card says that the author has not written, or that the API does not have.
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
    without_commit: tuple[str, ...]
    not_loaded: Mapping[str, str]
    left_out: Mapping[str, str]
    api_changes: tuple[str, ...]
    builds: BranchResult
    main: BranchResult | None
    note: str | None = None
    card_findings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""

        def with_dashes(fields: list[tuple[str, Any]]) -> dict[str, Any]:
            return {key.replace("_", "-"): value for key, value in fields}

        return asdict(self, dict_factory=with_dashes)

    def as_public_summary(self) -> dict[str, Any]:
        """Return the result as the file of the public builder's `--output-json` has it, with our keys besides."""
        branches = [result for result in (self.main, self.builds) if result]
        requests = [{"branch": done.branch, "url": done.pull_request} for done in branches if done.pull_request]
        changed = any(done.revision for done in branches)
        return {
            **self.as_dict(),
            "status": "pull_request_created" if requests else "uploaded" if changed else "no_changes",
            "repo_id": self.repo_id,
            "branch": self.builds.branch,
            "pull_requests": requests,
        }
