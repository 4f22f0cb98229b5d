"""Records in the cache of packages that have passed their checks, so that unchanged packages are not checked again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kernel_builder.package.assembly import package_key
from kernel_builder.steps.cache import mark_used
from kernel_builder.steps.graph import PlannedVariant
from kernel_format.files import write_atomically
from kernel_format.tree_digest import hash_tree

# The reason of a skipped `load` check that the caller left out.
NO_LOAD = "--no-load"


@dataclass(frozen=True)
class CheckRecord:
    """The check results of a package without errors."""

    tree: str  # the digest of the package's files
    passed: tuple[str, ...] = ()  # the checks that passed
    skipped: Mapping[str, str] = field(default_factory=dict)  # skipped check -> reason
    conditions: str | None = None  # the load conditions at that time; None if they do not determine the result
    # The sandbox of that build; None for no sandbox. Not in the package, whose bytes are equal with and without one.
    sandbox: str | None = None


def read(planned: PlannedVariant, package: Path, cache: Path) -> CheckRecord | None:
    """Return the record of a package, if the package matches these inputs; None otherwise."""
    try:
        stored = json.loads(_path(planned, cache).read_text())
        record = CheckRecord(**{**stored, "passed": tuple(stored["passed"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    mark_used(_path(planned, cache))
    return record if record.tree == hash_tree(package).value else None


def write(planned: PlannedVariant, record: CheckRecord, cache: Path) -> None:
    """Record that a package has passed its checks. If this fails, the next build repeats them."""
    path = _path(planned, cache)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(record)))


def _path(planned: PlannedVariant, cache: Path) -> Path:
    return cache / "packages" / f"{package_key(planned)}.json"
