"""Digests of whole packages, which are equal only for byte-equal packages."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from kernel_format.files import file_digest

# The signature of `metadata.json`, beside it.
SIGNATURE = "metadata.json.sigstore"


@dataclass(frozen=True)
class TreeDigest:
    """SHA-256 of every file of a package (its path -> hex digits), and one over all of them.

    `value` is the SHA-256 of the output of `sha256sum` for the files in the order of their paths, so that
    `cd DIR && find * -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum` gives the same.
    """

    value: str
    files: dict[str, str]


# The name, mode, and size or target of everything in a directory.
Listing = list[tuple[str, int, int | str]]


def contents(directory: Path) -> tuple[str, Listing]:
    """Return a value that is equal for two packages with equal files, directories, links and bytecode."""
    return hash_tree(directory).value, _listing(directory)


def is_unchanged(directory: Path, before: tuple[str, Listing]) -> bool:
    """Return whether a directory has the contents that it had, although untrusted code could write there.

    Files are read only if nothing else differs: there could be a file of 8 GB, or a link to an endless device.
    """
    digest, listing = before
    try:
        return _listing(directory, most=len(listing)) == listing and hash_tree(directory).value == digest
    except OSError:  # a path that is too long, or an unreadable file
        return False


def _listing(directory: Path, most: int | None = None) -> Listing:
    """List everything in a directory, but little more than `most` entries."""
    listing: Listing = []
    waiting = [directory]
    while waiting and (most is None or len(listing) <= most):
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                is_directory = entry.is_dir(follow_symlinks=False)
                about = os.readlink(entry.path) if entry.is_symlink() else 0 if is_directory else status.st_size  # noqa: PTH115
                listing.append((os.path.relpath(entry.path, directory), status.st_mode, about))
                if is_directory:
                    waiting.append(Path(entry.path))
    return sorted(listing)


def bytecode(directory: Path) -> list[str]:
    """Return the paths of bytecode, which no digest covers and Python runs in place of a source."""
    paths = (path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")))
    return list(filter(is_bytecode, paths))


def is_bytecode(path: str) -> bool:
    """Return whether Python takes a file for bytecode, on some systems in upper case, too."""
    folded = path.casefold()
    return folded.endswith((".pyc", ".pyo")) or "__pycache__" in folded.split("/")


def hash_tree(directory: Path) -> TreeDigest:
    """Return the digest of all files under `directory`, `metadata.json` included.

    Python's bytecode and the signature are left out: two signatures of the same bytes always differ.
    """
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc")
    names = sorted(path.as_posix() for path in paths if "__pycache__" not in path.parts and str(path) != SIGNATURE)
    files = {name: file_digest(directory / name) for name in names}
    lines = "".join(f"{digest}  {path}\n" for path, digest in files.items())
    return TreeDigest(hashlib.sha256(lines.encode()).hexdigest(), files)
