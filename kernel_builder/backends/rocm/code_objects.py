"""Finds the architectures of the code objects that HIP keeps in a binary, one for each of each source."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from kernel_builder import elf

_SECTION = ".hip_fatbin"
_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_NUMBER, _ENTRY = struct.Struct("<Q"), struct.Struct("<QQQ")
# The start of a target's name; the architecture follows.
_TARGET = "hipv4-amdgcn-amd-amdhsa--"


def archs(binary: Path) -> frozenset[str]:
    """Return the architectures that a shared object has code for."""
    data = elf.section(binary, _SECTION) or b""
    try:
        return frozenset(name.removeprefix(_TARGET) for name in _targets(data) if name.startswith(_TARGET))
    except (struct.error, ValueError) as error:
        raise elf.Unreadable(f"{binary.name} has a damaged code object: {error!r}") from error


def _targets(data: bytes) -> Iterator[str]:
    """Yield the targets of the bundles in a section, which begin at multiples of the page size."""
    start = data.find(_MAGIC)
    while start >= 0:
        position = end = start + len(_MAGIC)
        (count,) = _NUMBER.unpack_from(data, position)
        position += _NUMBER.size
        for _ in range(count):
            offset, size, length = _ENTRY.unpack_from(data, position)
            position += _ENTRY.size
            yield data[position : position + length].decode()
            position += length
            end = max(end, start + offset + size)
        start = data.find(_MAGIC, end)
