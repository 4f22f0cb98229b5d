"""Check that a binary has no run path."""

from __future__ import annotations

from collections.abc import Iterator

from kernel_builder.checks.findings import CheckedPackage, Finding

NAME = "run-path"


def check_run_path(package: CheckedPackage) -> Iterator[Finding]:
    for binary in package.binaries:
        for tag, value in binary.run_paths:
            yield Finding(
                NAME,
                binary.name,
                f"has the run path {value!r} ({tag}), which on another machine may contain other or hostile libraries",
                "link without -rpath: Torch's libraries are already loaded when a kernel is",
            )
