"""Check a binary's device code and its sources for code that its devices would not run well.

The back end defines the patterns.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_builder import backends
from kernel_builder.backends import DeviceFinding
from kernel_builder.checks import registrations
from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable

NAME = "device-code"


def check_device_code(package: CheckedPackage) -> Iterator[Finding]:
    variant = package.variant
    if variant is None or variant.platform is None:
        raise NotApplicable("the package has no device code of its own")
    backend = backends.compiled(variant.backend)
    if not backend.reads_device_code:
        raise NotApplicable(f"the builder does not read device code of {backend.title}")
    archs = package.known_metadata.archs
    for binary in package.binaries:
        for finding in backend.in_device_code(binary.path, archs):
            yield _finding(finding, binary.name)
    if package.project:
        for finding in backend.in_sources(registrations.sources(package.project, variant), archs):
            yield _finding(finding, finding.path)


def _finding(device_finding: DeviceFinding, path: str) -> Finding:
    return Finding(NAME, path, device_finding.message, device_finding.hint, device_finding.severity)
