"""Reads the code objects that HIP keeps in a binary, one for each architecture of each source."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_builder import elf

_SECTION = ".hip_fatbin"
_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_NUMBER, _ENTRY = struct.Struct("<Q"), struct.Struct("<QQQ")
# How the name of a target begins whose architecture follows.
_TARGET = "hipv4-amdgcn-amd-amdhsa--"
_TRIPLE = "amdgcn-amd-amdhsa--"


@dataclass(frozen=True)
class DeviceKernel:
    """A kernel in a code object: its mangled name, and how many registers of each kind it spills."""

    name: str
    vector_spills: int
    scalar_spills: int


@dataclass(frozen=True)
class CodeObject:
    """The device code of one source for one architecture.

    Attributes:
        arch: The architecture that the list of code objects names.
        target: The one that the code object names itself.
    """

    arch: str
    target: str
    kernels: tuple[DeviceKernel, ...]


def read(binary: Path) -> list[CodeObject]:
    """Return the code objects of a shared object.

    Raises:
        elf.Unreadable: If it, or a code object, cannot be read.
    """
    data = elf.section(binary, _SECTION) or b""
    try:
        return [_code_object(name, content) for name, content in _entries(data) if name.startswith(_TARGET)]
    except (struct.error, IndexError, KeyError, TypeError, ValueError) as error:
        raise elf.Unreadable(f"{binary.name} has a damaged code object: {error!r}") from error


def _entries(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield (target, content) of the bundles in a section, which begin at multiples of the page size."""
    start = data.find(_MAGIC)
    while start >= 0:
        position = start + len(_MAGIC)
        (count,) = _NUMBER.unpack_from(data, position)
        position += _NUMBER.size
        end = start + len(_MAGIC)
        for _ in range(count):
            offset, size, length = _ENTRY.unpack_from(data, position)
            position += _ENTRY.size
            yield data[position : position + length].decode(), data[start + offset : start + offset + size]
            position += length
            end = max(end, start + offset + size)
        start = data.find(_MAGIC, end)


def _code_object(target: str, content: bytes) -> CodeObject:
    metadata: Mapping[str, Any] = next(
        (_value(text, 0)[0] for name, text in elf.notes(content) if name == "AMDGPU"), {}
    )
    return CodeObject(
        arch=target.removeprefix(_TARGET),
        target=metadata.get("amdhsa.target", "").removeprefix(_TRIPLE),
        kernels=tuple(
            DeviceKernel(kernel[".name"], kernel[".vgpr_spill_count"], kernel[".sgpr_spill_count"])
            for kernel in metadata.get("amdhsa.kernels", ())
        ),
    )


# The part of MessagePack that LLVM writes the metadata in. A package for it would be another dependency for each user.
_NUMBERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_LISTS, _MAPS = {0xDC: ">H", 0xDD: ">I"}, {0xDE: ">H", 0xDF: ">I"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def _value(data: bytes, at: int) -> tuple[Any, int]:
    """Return the value at a position, and the position after it."""
    first, at = data[at], at + 1
    if first < 0x80 or first >= 0xE0:
        return (first if first < 0x80 else first - 0x100), at
    if first in _CONSTANTS:
        return _CONSTANTS[first], at
    size = first & (0x1F if 0xA0 <= first < 0xC0 else 0xF)
    if form := (_NUMBERS | _TEXTS | _LISTS | _MAPS).get(first):
        size, at = struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    elif first >= 0xC0:
        raise ValueError(f"the type {first:#x} in its metadata")
    if first in _NUMBERS:
        return size, at
    if 0xA0 <= first < 0xC0 or first in _TEXTS:
        return data[at : at + size].decode(), at + size
    is_map = first < 0x90 or first in _MAPS
    items = []
    for _ in range(size * 2 if is_map else size):
        item, at = _value(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if is_map else items), at
