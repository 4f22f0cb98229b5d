"""Is each binary a sound shared object for the variant's platform?"""

from __future__ import annotations

from collections.abc import Iterator

from kernel_builder import elf
from kernel_builder.checks.findings import Finding, NotApplicable, Package

NAME = "binary"


def check(package: Package) -> Iterator[Finding]:
    if not package.binary_paths:
        raise NotApplicable("the package has no binary")
    platform = package.variant.platform if package.variant else None
    for path in package.binary_paths:
        try:
            binary = elf.read(path)
        except elf.Unreadable as error:
            yield Finding(NAME, path.name, str(error), "build the package again: the file is damaged or not a binary")
            continue
        if platform and platform.split("-")[0] != binary.machine:
            yield Finding(
                NAME,
                binary.name,
                f"is for {binary.machine}, in a variant for {platform}",
                f"build it with a compiler for {platform}",
            )
        if binary.executable_stack:
            yield Finding(
                NAME,
                binary.name,
                "asks for an executable stack, which hardened systems and newer glibc refuse to give to a library",
                'mark assembly sources with `.section .note.GNU-stack,"",@progbits`, avoid nested functions, '
                "and drop `-z execstack`",
            )
        if binary.text_relocations:
            yield Finding(
                NAME,
                binary.name,
                "has text relocations: its code must be made writable to be loaded",
                "compile every source and assembly file as position-independent code (`-fPIC`)",
            )
