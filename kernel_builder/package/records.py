"""Notes in the cache of packages that have passed their checks, so that unchanged ones are not checked again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kernel_builder.package.assembly import package_key
from kernel_builder.steps.graph import PlannedVariant
from kernel_format.files import write_atomically
from kernel_format.tree_digest import hash_tree

# Why the check `load` was skipped where the caller left it out.
NO_LOAD = "--no-load"


@dataclass(frozen=True)
class CheckRecord:
    """What the checks of a package said when it was built. None of them had an error.

    Attributes:
        tree: The digest of the package's files.
        passed: The checks that passed.
        skipped: Check -> why it did not run.
        conditions: What that depended on; None if that is not known.
        sandbox: What the `steps` of that build and its `load` check ran in; None for no sandbox. It is not in the
            package: equal inputs give equal bytes on machines with and without one.
    """

    tree: str
    passed: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    conditions: str | None = None
    sandbox: Mapping[str, str | None] = field(default_factory=dict)


def read(planned: PlannedVariant, package: Path, cache: Path) -> CheckRecord | None:
    """Return the note of a package, if it is what these inputs give; None otherwise."""
    try:
        stored = json.loads(_path(planned, cache).read_text())
        passed, skipped = tuple(stored["passed"]), dict(stored["skipped"])
        record = CheckRecord(stored["tree"], passed, skipped, stored["conditions"], stored.get("sandbox", {}))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if record.tree == hash_tree(package).value else None


def write(planned: PlannedVariant, record: CheckRecord, cache: Path) -> None:
    """Note that a package has passed its checks.

    A record that cannot be written costs one more check in the next build, and nothing else.
    """
    path = _path(planned, cache)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(record)))


def _path(planned: PlannedVariant, cache: Path) -> Path:
    return cache / "packages" / f"{package_key(planned)}.json"
