"""Does a binary look for its libraries only where every machine has them?"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_builder.checks.findings import Finding, Package

NAME = "run-path"


def check(package: Package) -> Iterator[Finding]:
    for binary in package.binaries:
        for tag, value in binary.run_paths:
            yield Finding(
                NAME,
                binary.name,
                f"has the run path {value!r} ({tag}), where another machine may have other libraries, or anyone's",
                "link without -rpath: Torch's libraries are already loaded when a kernel is",
            )
