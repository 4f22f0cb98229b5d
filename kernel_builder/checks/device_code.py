"""Check that a binary has device code for the architectures of its metadata."""

from __future__ import annotations

from collections.abc import Iterator

from kernel_builder import backends, elf
from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable

NAME = "device-code"


def check_device_code(package: CheckedPackage) -> Iterator[Finding]:
    variant = package.variant
    if variant is None or variant.platform is None:
        raise NotApplicable("the package has no device code of its own")
    backend = backends.compiled(variant.backend)
    expected = frozenset(package.known_metadata.archs)
    for binary in package.binaries:
        try:
            found = backend.device_archs(binary.path)
        except elf.Unreadable as error:
            yield Finding(NAME, binary.name, str(error), "build the package again")
            continue
        if found is None:
            raise NotApplicable(f"the builder does not read device code of {backend.title}")
        for archs, fault in (
            (expected - found, "has no code for {}, which its metadata lists"),
            (found - expected, "has code for {}, which its metadata does not list"),
        ):
            if archs:
                yield Finding(NAME, binary.name, fault.format(", ".join(sorted(archs))), "build the package again")
