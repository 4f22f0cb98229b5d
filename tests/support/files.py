"""Files of several directories, and programs, that tests write."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_files(directory: Path, files: Mapping[str, str] | Iterable[str]) -> Path:
    """Write texts, or empty files, below a directory, and return the directory."""
    for name, text in (files if isinstance(files, Mapping) else dict.fromkeys(files, "")).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def replace(file: Path, old: str, new: str) -> None:
    """Replace the first occurrence of a text in a file; it must be there."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def append(file: Path, text: str) -> None:
    """Add a text at the end of a file."""
    with file.open("a") as stream:
        stream.write(text)


def write_program(path: Path, script: str) -> Path:
    """Write a shell script that can be run by its path."""
    write_files(path.parent, {path.name: f"#!/bin/sh\n{script}\n"})
    path.chmod(0o755)
    return path


def elf_file(section: str, content: bytes) -> bytes:
    """Return an ELF file with one section."""
    names = f"\0.shstrtab\0{section}\0".encode()
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, 62, 1, 0, 0, 64, 0, 64, 56, 0, 64, 3, 1)
    tables = ((0, 0, 0, 0), (1, 3, 256 + len(content), len(names)), (11, 1, 256, len(content)))
    return header + b"".join(struct.pack("<II16xQQ24x", *table) for table in tables) + content + names
