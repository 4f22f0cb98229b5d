"""The request for a publication, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Names in `PublishRequest.allow` beside those of checks.
UNTESTED = "untested"
API_CHANGE = "api-change"
LARGE_FILE = "large-file"


@dataclass(frozen=True)
class PublishRequest:
    """The packages to publish, and their repository.

    Attributes:
        directory: The project; its packages are in `build`.
        repo_id: The repository. None: `[general.hub] repo-id` of `build.toml`.
        owner: The owner of the project, and of its `kernel-depends` of the same owner. None: as in `build.toml`.
        branch: The branch of the builds. None: `[general.hub] branch`, or else `v<version>`.
        private: Make the repository private, if it is created.
        create_pr: Open pull requests instead of committing to the branches.
        prune: Delete the variants on the branch that are not among the packages.
        card_note: A sentence for the card, such as how the packages were tested.
        dry_run: Check and compare only; write nothing.
        load: Check that each package loads, if this machine can load it.
        allow: Names of checks whose errors do not stop the publication. `untested`: publish also packages whose
            metadata states that they have not run on their hardware. `api-change`: publish an API that breaks callers
            of this version. `large-file`: publish sources of any size.
        endpoint: The address of the Hub. None: `$HF_ENDPOINT`, or else huggingface.co.
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
    load: bool = True
    allow: tuple[str, ...] = ()
    endpoint: str | None = None

    @property
    def allowed_checks(self) -> tuple[str, ...]:
        """The names in `allow` that are names of checks."""
        return tuple(name for name in self.allow if name not in (UNTESTED, API_CHANGE, LARGE_FILE))


@dataclass(frozen=True)
class BranchResult:
    """The changes to one branch; in a dry run, the planned ones. `revision` and `url` are the commit's, if any."""

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
        kept: Variants on the branch that this publication does not touch.
        dirty: Variants in `variants` and `kept` whose sources or builder had uncommitted changes.
        without_commit: Variants in `variants` and `kept` whose sources are in no commit, so that users cannot verify
            them.
        not_loaded: Variants in `variants` that this machine has not loaded, with the reason.
        left_out: Packages that are not published, with the reason.
        api_changes: Differences between the API and that of the variants on the branch.
        main: Changes to `main`. None if `main` belongs to a newer version.
        note: Why `main` was left unchanged, if it was.
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
    note: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        return asdict(self, dict_factory=lambda fields: {key.replace("_", "-"): value for key, value in fields})

    def as_public_summary(self) -> dict[str, Any]:
        """Return the result with the keys of the public tool's `--output-json` beside those of `as_dict`."""
        branches = [result for result in (self.main, self.builds) if result]
        requests = [{"branch": result.branch, "url": result.pull_request} for result in branches if result.pull_request]
        changed = any(result.revision for result in branches)
        return {
            **self.as_dict(),
            "status": "pull_request_created" if requests else "uploaded" if changed else "no_changes",
            "repo_id": self.repo_id,
            "branch": self.builds.branch,
            "pull_requests": requests,
        }
