"""Digests of whole packages, to tell whether two are equal to the bit."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

# The signature of `metadata.json`, beside it.
SIGNATURE = "metadata.json.sigstore"


@dataclass(frozen=True)
class TreeDigest:
    """SHA-256 of every file of a package (its path -> hex digits), and one over all of them.

    `value` is the SHA-256 of what `sha256sum` prints for the files in the order of their paths, so that
    `cd DIR && find * -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum` gives the same.
    """

    value: str
    files: dict[str, str]


def contents(directory: Path) -> tuple[str, list[tuple[str, int]]]:
    """Return a value that is equal for two packages with equal files, directories, links and bytecode."""
    entries = sorted((str(path.relative_to(directory)), path.lstat().st_mode) for path in directory.rglob("*"))
    return hash_tree(directory).value, entries


def hash_tree(directory: Path) -> TreeDigest:
    """Return the digest of all files under `directory`, `metadata.json` included.

    Python's bytecode and the signature are left out: two signatures of the same bytes always differ.
    """
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc")
    names = sorted(path.as_posix() for path in paths if "__pycache__" not in path.parts and str(path) != SIGNATURE)
    files = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}
    lines = "".join(f"{digest}  {path}\n" for path, digest in files.items())
    return TreeDigest(hashlib.sha256(lines.encode()).hexdigest(), files)
