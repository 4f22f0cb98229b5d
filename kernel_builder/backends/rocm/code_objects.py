"""Reads the code objects that HIP keeps in a binary, one for each architecture of each source."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from kernel_builder import elf
from kernel_builder.backends import DeviceCode, ReadAt

_SECTION = ".hip_fatbin"
_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_NUMBER, _ENTRY = struct.Struct("<Q"), struct.Struct("<QQQ")
# The start of a target's name; the architecture follows.
_TARGET = "hipv4-amdgcn-amd-amdhsa--"


def read(binary: Path, read_at: ReadAt) -> list[DeviceCode]:
    """Return the code of a shared object; see `CompiledBackend.device_code`."""
    section = next((section for section in elf.sections(binary) if section.name == _SECTION), None)
    if section is None:
        return []
    try:
        return [
            DeviceCode(name.removeprefix(_TARGET), False, size, source)
            for source, name, size in _targets(read_at(section.offset, section.size))
            if name.startswith(_TARGET)
        ]
    except (struct.error, ValueError) as error:
        raise elf.Unreadable(f"{binary.name} has a damaged code object: {error!r}") from error


def _targets(data: bytes) -> Iterator[tuple[int, str, int]]:
    """Yield the targets and sizes in the bundles of a section, which begin at multiples of the page size."""
    start, source = data.find(_MAGIC), 0
    while start >= 0:
        position = end = start + len(_MAGIC)
        (count,) = _NUMBER.unpack_from(data, position)
        position += _NUMBER.size
        for _ in range(count):
            offset, size, length = _ENTRY.unpack_from(data, position)
            position += _ENTRY.size
            yield source, data[position : position + length].decode(), size
            position += length
            end = max(end, start + offset + size)
        start, source = data.find(_MAGIC, end), source + 1
