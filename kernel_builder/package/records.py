"""Notes in the cache of packages that have passed their checks, so that unchanged ones are not checked again."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from kernel_builder.build.graph import PlannedVariant
from kernel_builder.files import write_atomically
from kernel_builder.package.assembly import package_key
from kernel_builder.package.tree_digest import hash_tree


def is_current(planned: PlannedVariant, package: Path, cache: Path, *, load: bool) -> bool:
    """Return whether a package is what these inputs give and has passed its checks.

    Args:
        load: Loading the package must have been one of the checks.
    """
    try:
        record = json.loads(_path(planned, cache).read_text())
    except (OSError, ValueError):
        return False
    checked = record.get("loaded") or not load
    return bool(checked and record.get("tree") == hash_tree(package).value)


def write(planned: PlannedVariant, tree: str, cache: Path, *, load: bool) -> None:
    """Note that the package whose files have the digest `tree` has passed its checks.

    A record that cannot be written costs one more check in the next build, and nothing else.
    """
    path = _path(planned, cache)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"tree": tree, "loaded": load}))


def _path(planned: PlannedVariant, cache: Path) -> Path:
    return cache / "packages" / f"{package_key(planned)}.json"
