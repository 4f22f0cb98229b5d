"""Check that the files of a package match the digest in its metadata."""

from __future__ import annotations

from collections.abc import Iterator

from kernels_data import Digest, DigestValidationError, DigestViolation, Metadata

from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable

NAME = "digest"
_HINT = "build the package again, and do not edit its files by hand"


def check_digest(package: CheckedPackage) -> Iterator[Finding]:
    if package.known_metadata.digest is None:
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
