"""Damaged and hostile ELF files."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from kernel_builder import elf

PROGBITS, NOBITS, COMPRESSED = 1, 8, 0x800
SMALL = zlib.compress(bytes(1 << 20))


def write(path: Path, content: bytes, *headers: tuple[int, int, int]) -> Path:
    """Write an object with `.rodata` sections at the start of the content, each (type, flags, size)."""
    names = b"\0.rodata\0.shstrtab\0"
    sections = [(1, kind, flags, 64, size) for kind, flags, size in headers]
    sections = [(0, 0, 0, 0, 0), *sections, (9, 3, 0, 64 + len(content), len(names))]
    ident = b"\x7fELF\2\1\1" + bytes(9)
    table = 64 + len(content) + len(names)
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", ident, 3, 62, 1, 0, 0, table, 0, 64, 56, 0, 64, len(sections), len(sections) - 1
    )
    rows = [
        struct.pack("<IIQQQQIIQQ", name, kind, flags, 0, at, size, 0, 0, 1, 0)
        for name, kind, flags, at, size in sections
    ]
    path.write_bytes(head + content + names + b"".join(rows))
    return path


@pytest.mark.attack
def test_sections_stand_for_no_more_than_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    text = b"one\0two\0"
    assert elf.constants(write(path, text, (PROGBITS, 0, 8), (NOBITS, 0, 1 << 40))) == [text]
    bomb = struct.pack("<IIQQ", 1, 0, 1 << 20, 1) + SMALL
    for content, headers in ((bomb, [(PROGBITS, COMPRESSED, len(bomb))]), (bytes(4096), [(PROGBITS, 0, 4096)] * 9)):
        with pytest.raises(elf.Unreadable, match=r"x.so has sections that are compressed or overlap"):
            elf.constants(write(path, content, *headers))
    with pytest.raises(elf.Unreadable):
        elf.constants(write(path, text, (PROGBITS, 0, 1 << 62)))
