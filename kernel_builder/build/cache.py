"""The builder's cache of objects and binaries, and the directory in which a build works.

Outputs are named by content. An output takes its name by a rename, when it is whole.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernel_builder.build.graph import Binary, CompileStep, Graph
from kernel_builder.errors import StoreError

# Outputs that no build has used for this long are removed; they can be made again.
_KEEP_SECONDS = 30 * 24 * 3600


def object_path(cache: Path, step: CompileStep) -> Path:
    """Return where the object of a compile step is kept."""
    return cache / "objects" / step.key[:2] / f"{step.key}.o"


def binary_path(cache: Path, binary: Binary) -> Path:
    """Return where a linked binary is kept."""
    return cache / "binaries" / binary.key[:2] / f"{binary.key}.so"


def missing(graph: Graph, cache: Path) -> tuple[list[CompileStep], list[Binary]]:
    """Return the steps to run: the binaries that the cache lacks, and those of their objects that it lacks."""
    binaries = [binary for binary in graph.binaries if not binary_path(cache, binary).exists()]
    needed = {step.key: step for binary in binaries for step in binary.objects}
    return [step for step in needed.values() if not object_path(cache, step).exists()], binaries


def check_path(directory: Path) -> None:
    """Raise a StoreError if compilers cannot work in a directory because of its name."""
    # nvcc splits its options at commas and white space, with no quoting that survives all of its steps.
    if re.search(r"[\s,;:'\"\\$`]", str(directory)):
        raise StoreError(
            "compilers cannot work in a directory whose path has white space, quotes, commas, colons or backslashes",
            where=str(directory),
            hint="set KERNEL_BUILDER_CACHE to a plain path; project directories may have any name",
        )


@contextmanager
def work_directory(cache: Path) -> Iterator[Path]:
    """Make the directory in which a build's steps run, and remove it at the end.

    The caller holds the cache's lock, so an existing directory belongs to a build that was killed. Compilers of that
    build may still be running. They use relative paths, so they stay in their own directory when it is renamed, and
    their last command finds that it is no longer the directory of this name. See `step_scripts`.

    The name is always the same, since a compiler cache takes it into its keys.
    """
    work = cache / "work"
    if work.exists():
        work.rename(cache / f"removed-{uuid.uuid4().hex}")
    for removed in cache.glob("removed-*"):
        shutil.rmtree(removed, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def prune(graph: Graph, cache: Path) -> None:
    """Remove what no build has used for a month; a graph's own outputs count as used now."""
    used = [object_path(cache, step) for step in graph.compiles] + [binary_path(cache, one) for one in graph.binaries]
    for path in used:
        if path.exists():
            os.utime(path)
    oldest = time.time() - _KEEP_SECONDS
    for folder in ("objects", "binaries", "packages"):
        for path in (cache / folder).rglob("*"):
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)
