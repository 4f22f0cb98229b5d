"""Are the files of a package the ones that its metadata lists?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_builder.checks.model import Finding, NotApplicable, Package

NAME = "digest"
_HINT = "build the package again: files of a package are not edited by hand"


@dataclass(frozen=True)
class TreeDigest:
    """SHA-256 of every file of a package (its path -> hex digits), and one over them all.

    `value` is the SHA-256 of what `sha256sum` prints for the files in the order of their paths, so that
    `cd DIR && find * -type f | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum` gives the same.
    """

    value: str
    files: dict[str, str]


def hash_tree(directory: Path) -> TreeDigest:
    """The digest of all files under `directory` but Python's bytecode, `metadata.json` included.

    Two packages have the same value when and only when they are equal to the bit.
    """
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc")
    names = sorted(path.as_posix() for path in paths if "__pycache__" not in path.parts)
    files = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}
    lines = "".join(f"{digest}  {path}\n" for path, digest in files.items())
    return TreeDigest(hashlib.sha256(lines.encode()).hexdigest(), files)


def check(package: Package) -> Iterator[Finding]:
    from kernels_data import Digest, DigestValidationError, DigestViolation, Metadata

    if "digest" not in package.known_metadata:
        yield Finding(NAME, "metadata.json", "has no `digest` of the package's files", "build the package again")
        return
    try:
        expected = Metadata.read_from_file(package.directory / "metadata.json").digest
    except ValueError as error:
        raise NotApplicable(str(error)) from error
    assert expected is not None
    try:
        expected.validate(Digest.hash_variant(expected.algorithm, package.directory))
    except DigestValidationError as error:
        for violation in error.violations:
            if isinstance(violation, DigestViolation.MissingFile):
                yield Finding(NAME, violation.path, "is in the digest of metadata.json but not in the package", _HINT)
            elif isinstance(violation, DigestViolation.UnknownFile):
                yield Finding(NAME, violation.path, "is in the package but not in the digest of metadata.json", _HINT)
            elif isinstance(violation, DigestViolation.HashMismatch):
                yield Finding(NAME, violation.path, "has another SHA-256 than the digest of metadata.json", _HINT)
            else:
                yield Finding(NAME, "metadata.json", str(violation), _HINT)
