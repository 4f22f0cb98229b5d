"""The toolchain lock: which files of an index, which byte ranges of them, and the hashes that pin their content.

The lock has one entry for each component. It holds file names and no addresses, so that any index that has the files
will do. Of each wheel only the byte ranges with the needed files are fetched. A source distribution, which is one
compressed stream, is fetched whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kernel_builder.config.variant import Release
from kernel_format.errors import ToolchainError

SCHEMA = 6
# The platform of a component that is the same on all platforms.
ANY = "any"

# Increase when equal pinned files are unpacked to different trees, or when `take` of a component with a tree for each
# platform changes: trees of older builders are then not used.
_RECIPE = 1


class PinnedFile(NamedTuple):
    """Part of one wheel, or of one source distribution.

    Attributes:
        sha256: SHA-256 of the whole file, as the index states it.
        record: SHA-256 of the wheel's `RECORD`, the file's part of a tree's name; None for a source distribution.
        ranges: Byte ranges `(start, stop)` to fetch, ascending and disjoint. Each holds whole zip members.
        fetched: SHA-256 of the bytes of all ranges in order.
        prefix: A directory in the file, with a slash at its end. Files outside of it are left out.
        take: The files of `prefix` to keep: names that begin with one of these.
    """

    project: str
    version: str
    file: str
    sha256: str
    record: str | None
    ranges: tuple[tuple[int, int], ...]
    fetched: str
    prefix: str
    take: tuple[str, ...]

    @property
    def identity(self) -> str:
        """The hash that pins all kept files."""
        return self.record or self.sha256

    @property
    def download(self) -> int:
        """Bytes to fetch."""
        return sum(stop - start for start, stop in self.ranges)


class Tree(NamedTuple):
    """One directory of the store, unpacked from pinned files.

    Attributes:
        kind: The name of its component; see `components.Component`.
        platform: The platform that it is for; `any` if all platforms share it.
    """

    kind: str
    title: str
    version: str
    platform: str
    files: tuple[PinnedFile, ...]

    @property
    def identity(self) -> str:
        """Digest of the pinned content and the recipe, equal on every machine."""
        pinned = [_RECIPE, self.kind, self.platform, [file.identity for file in self.files]]
        if self.platform == ANY:
            pinned.append([file.take for file in self.files])
        return hashlib.sha256(json.dumps(pinned).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The name in the store."""
        return f"{self.kind}-{self.platform}-{self.identity[:16]}"

    @property
    def download(self) -> int:
        """Bytes to download."""
        return sum(file.download for file in self.files)


# Component -> platform -> tree.
Lock = Mapping[str, Mapping[str, Tree]]


def tree(lock: Lock, name: str, platform: str) -> Tree | None:
    """Return the tree of a component for a platform, or None if it is not pinned for it."""
    trees = lock.get(name, {})
    return trees.get(ANY) or trees.get(platform)


def torch_releases(lock: Lock) -> list[Release]:
    """Return the Torch releases whose headers a lock has, ascending."""
    parts = (name.split("-") for name in lock if name.startswith("torch-"))
    return sorted({Release.parse(release) for _, release, _ in parts})


def load_file(entry: Mapping[str, Any]) -> PinnedFile:
    """Return the pinned file of an entry of the lock."""
    ranges = [text.split("-") for text in entry["ranges"]]
    parsed = tuple((int(start), int(stop)) for start, stop in ranges)
    return PinnedFile(**{**entry, "ranges": parsed, "take": tuple(entry["take"])})


def loads(text: str, where: str) -> Lock:
    """Parse the text of a lock; `where` is the file name for errors."""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}, expected {SCHEMA}")
        return {
            name: {
                platform: Tree(name, entry["title"], entry["version"], platform, tuple(map(load_file, files)))
                for platform, files in entry["platforms"].items()
            }
            for name, entry in data["components"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "`kernel-builder toolchain update DIR` writes that of a checkout"
        raise ToolchainError(f"is not a toolchain lock: {error!r}", where=where, hint=hint) from error


def dumps(lock: Lock) -> str:
    """Return the text of a lock: JSON with one value a line, so that changes are easy to review."""
    components = {}
    for name, trees in lock.items():
        first = next(iter(trees.values()))
        platforms = {
            platform: [
                {**file._asdict(), "ranges": [f"{start}-{stop}" for start, stop in file.ranges]} for file in tree.files
            ]
            for platform, tree in trees.items()
        }
        components[name] = {"title": first.title, "version": first.version, "platforms": platforms}
    return json.dumps({"schema": SCHEMA, "components": components}, indent=2) + "\n"


@lru_cache(maxsize=1)
def shipped() -> Lock:
    """Return the lock that comes with the builder."""
    return loads(Path(__file__).with_name("lock.json").read_text(encoding="utf-8"), "lock.json")
