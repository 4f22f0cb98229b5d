"""The CUDA releases of the matrix, and the capabilities that a kernel is compiled for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_builder import toml_file
from kernel_builder.config.project import Kernel, arch_number
from kernel_format.errors import VariantError
from kernel_format.release import Release

TABLE = Path(__file__).with_name("cuda.toml")
DATA: Mapping[str, Any] = toml_file.read(TABLE)
# CUDA release of the matrix -> the capabilities that its compiler knows, without suffixes and `+PTX`, ascending.
KNOWN_CAPABILITIES: Mapping[Release, tuple[str, ...]] = dict(
    sorted((Release.parse(release), tuple(entry["capabilities"])) for release, entry in DATA["release"].items())
)


def capability_key(capability: str) -> tuple[int, int, str]:
    match = re.match(r"(\d+)\.(\d+)(.*)", capability)
    assert match, capability
    return int(match[1]), int(match[2]), match[3]


def runs_on(entry: str, capability: str) -> bool:
    """Return whether a GPU of a capability runs the code for an entry of `cuda-capabilities`."""
    (major, minor, suffix), (of_gpu, minor_of_gpu, _) = capability_key(entry), capability_key(capability)
    if suffix.startswith("a"):
        return (major, minor) == (of_gpu, minor_of_gpu)
    if suffix == "+PTX":
        return (major, minor) <= (of_gpu, minor_of_gpu)
    return major == of_gpu and minor <= minor_of_gpu


def capabilities(kernel: Kernel, cuda: Release, platform: str) -> tuple[str, ...]:
    """Return the capabilities to compile a kernel for, ascending.

    These are the entries of the kernel's list that the compiler knows and the platform has. A kernel without a list
    gets all such capabilities, and PTX of the newest. `Kernel.only_capabilities` selects among these.
    """
    tegra = DATA["tegra"]
    known = set(KNOWN_CAPABILITIES[cuda])
    if platform not in tegra["platforms"]:
        known -= set(tegra["capabilities"])
    if kernel.cuda_capabilities is None:
        newest = max(known, key=capability_key)
        every = tuple(f"{c}+PTX" if c == newest else c for c in sorted(known, key=capability_key))
        return _nearest(every, kernel.only_capabilities)
    wanted = {c for c in kernel.cuda_capabilities if arch_number(c) in known}
    if not wanted:
        raise VariantError(
            f"no capability is left: CUDA {cuda} for {platform} compiles for none of "
            f"{', '.join(kernel.cuda_capabilities)}",
            where=f"build.toml: [kernel.{kernel.name}] cuda-capabilities",
            hint="add a capability, or leave this CUDA release out by [general.cuda] minver or maxver",
        )
    return _nearest(tuple(sorted(wanted, key=capability_key)), kernel.only_capabilities)


def _nearest(ascending: tuple[str, ...], only: Sequence[str]) -> tuple[str, ...]:
    """Return the entries for the capabilities in `only`, each with its suffix; all if `only` is empty.

    A capability without an entry of its number gets the nearest entry below it, whose code a GPU of that capability may
    run, or else the lowest: the link needs the symbols of every kernel.
    """
    if not only:
        return ascending
    numbers = [capability_key(entry)[:2] for entry in ascending]
    chosen = set()
    for number in (capability_key(capability)[:2] for capability in only):
        chosen.add(max((n for n in numbers if n <= number), default=numbers[0]))
    return tuple(entry for entry, number in zip(ascending, numbers, strict=True) if number in chosen)
