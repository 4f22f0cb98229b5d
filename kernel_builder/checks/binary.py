"""Check that each binary is a valid shared object for the variant's platform."""

from __future__ import annotations

from collections.abc import Iterator

from kernel_builder import elf
from kernel_builder.checks.findings import CheckedPackage, Finding, NotApplicable

NAME = "binary"


def check_binary(package: CheckedPackage) -> Iterator[Finding]:
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
                "requests an executable stack, which hardened systems and newer glibc deny to libraries",
                'mark assembly sources with `.section .note.GNU-stack,"",@progbits`, avoid nested functions, '
                "and drop `-z execstack`",
            )
        if binary.text_relocations:
            yield Finding(
                NAME,
                binary.name,
                "has text relocations, so its code pages must be writable while it is loaded",
                "compile every source and assembly file as position-independent code (`-fPIC`)",
            )
