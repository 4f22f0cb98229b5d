"""Check that a binary has device code for the architectures of its metadata, by which clients refuse a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kernel_builder import backends, elf
from kernel_builder.backends import DeviceCode
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
            code = backend.device_code(binary.path)
        except elf.Unreadable as error:
            yield Finding(NAME, binary.name, str(error), "build the package again")
            continue
        if code is None:
            raise NotApplicable(f"the builder does not read device code of {backend.title}")
        if not code:
            raise NotApplicable(f"{binary.name} has no device code")
        found = frozenset(architectures(code))
        if missing := expected - found:
            message = f"has no code for {', '.join(sorted(missing))}, which its metadata lists"
            yield Finding(NAME, binary.name, message, "build the package again")
        if unlisted := found - expected:
            message = f"has code for {', '.join(sorted(unlisted))}, which its metadata does not list"
            yield Finding(NAME, binary.name, message, "build the package again", "warning")


def architectures(code: Iterable[DeviceCode]) -> tuple[str, ...]:
    """Return the architectures of device code as metadata lists them, ascending: `9.0a`, `12.0+PTX`."""
    parts = list(code)
    ptx = {part.arch for part in parts if part.is_ptx}
    names = sorted({part.arch for part in parts}, key=lambda arch: (arch.find("."), arch))
    return tuple(f"{name}+PTX" if name in ptx else name for name in names)
