"""Reads the device code that CUDA keeps in a binary: architectures, sizes and, if it is not compressed, kernel names.

The section `.nv_fatbin` has a container for each source, and a container has an entry for each architecture. NVIDIA
does not document the format. The fields are those that nvcc 12.8 to 13.2 and clang 22 write; `cuobjdump` prints the
same values.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kernel_builder import elf
from kernel_builder.backends import DeviceCode, ReadAt

_SECTION = ".nv_fatbin"
# The section with a pointer to each container, and the dynamic linker's table of their values. With them, containers
# are read in parallel, which saves seconds over a network.
_POINTERS, _RELOCATIONS = ".nvFatBinSegment", ".rela.dyn"
_MOST_RELOCATIONS = 512 << 10  # bytes; a larger table costs more than it saves

_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of the header, size of the entries
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")  # kind, version, sizes of header and code, ..., architecture, ..., flags, ...
_RELOCATION = struct.Struct("<QQq")  # Elf64_Rela: place, type, address
_MAGIC = 0xBA55ED50
_ALIGNMENT = 8
_PTX, _SASS = 1, 2
_ARCH_SPECIFIC, _FAMILY_SPECIFIC = 0x100000, 0x200000
_CUBIN = struct.Struct("<4s36xQ14xH")  # Elf64_Ehdr: magic, ..., offset of section headers, ..., index of the names
_NAMES = struct.Struct("<24xQQ24x")  # Elf64_Shdr: ..., offset, size, ...
_AT_ONCE = 16


def read(binary: Path, read_at: ReadAt) -> list[DeviceCode]:
    """Return the code of a shared object; see `CompiledBackend.device_code`."""
    sections = {section.name: section for section in elf.sections(binary)}
    section = sections.get(_SECTION)
    if section is None:
        return []
    end = section.offset + section.size
    starts = sorted({section.offset, *_starts(sections, read_at)})
    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            parts = pool.map(
                lambda bounds: list(_entries(read_at, *bounds)), zip(starts, [*starts[1:], end], strict=True)
            )
            containers = [container for part in parts for container in part]
    except struct.error as error:
        raise elf.Unreadable(f"{binary.name} has damaged device code: {error}") from error
    return [replace(entry, source=number) for number, container in enumerate(containers) for entry in container]


def _starts(sections: Mapping[str, elf.Section], read_at: ReadAt) -> Iterator[int]:
    """Yield the offsets of containers in the file, as far as the dynamic linker's table has them."""
    code, pointers, table = (sections.get(name) for name in (_SECTION, _POINTERS, _RELOCATIONS))
    if code is None or pointers is None or table is None or table.size > _MOST_RELOCATIONS:
        return
    data = read_at(table.offset, table.size - table.size % _RELOCATION.size)
    for place, _, address in _RELOCATION.iter_unpack(data):
        if place in range(pointers.address, pointers.address + pointers.size):
            offset = address - code.address
            if offset in range(code.size):
                yield code.offset + offset


def _entries(read_at: ReadAt, start: int, end: int) -> Iterator[list[DeviceCode]]:
    """Yield the entries of each container between two offsets, without the number of the source."""
    while start + _CONTAINER.size <= end:
        magic, _, header, size = _CONTAINER.unpack(read_at(start, _CONTAINER.size))
        if magic != _MAGIC:
            if magic == 0:  # padding
                start += _ALIGNMENT
                continue
            raise struct.error(f"no container at byte {start}")
        if header < _CONTAINER.size:
            raise struct.error(f"the container at byte {start} has a header of {header} bytes")
        position, stop = start + header, start + header + size
        entries: list[DeviceCode] = []
        kernels: tuple[str, ...] = ()  # the same for each architecture, by the rules of CUDA
        while position < stop:
            kind, _, header, length, *_, arch, _, _, flags, _, _ = _ENTRY.unpack(read_at(position, _ENTRY.size))
            if header < _ENTRY.size or position + header + length > min(stop, end):
                raise struct.error(f"no entry at byte {position}")
            if kind in (_PTX, _SASS):
                suffix = "a" if flags & _ARCH_SPECIFIC else "f" if flags & _FAMILY_SPECIFIC else ""
                if kind == _SASS:
                    kernels = kernels or _kernels(read_at, position + header, length)
                entries.append(DeviceCode(f"{arch // 10}.{arch % 10}{suffix}", kind == _PTX, length, 0))
            position += header + length
        yield [replace(entry, kernels=kernels) for entry in entries]
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT


def _kernels(read_at: ReadAt, cubin: int, length: int) -> tuple[str, ...]:
    """Return the kernels that a cubin has sections for; none if it is compressed."""
    magic, sections, names = _CUBIN.unpack(read_at(cubin, _CUBIN.size))
    if magic != b"\x7fELF":
        return ()
    offset, size = _NAMES.unpack(read_at(cubin + sections + names * _NAMES.size, _NAMES.size))
    if offset + size > length:
        raise struct.error(f"the names of the cubin at byte {cubin} are outside of it")
    found = re.findall(rb"\0\.text\.(\w+)", read_at(cubin + offset, size))
    return tuple(sorted({name.decode() for name in found}))
