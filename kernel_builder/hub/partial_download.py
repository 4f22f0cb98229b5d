"""Downloads of packages those parts that can be read without loading them: small files, and the headers of binaries.

A binary is mostly code. Its copy here has the size of the original, and holes in place of all unread parts, so the same
functions read the copy and a whole file.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

from kernel_builder import backends, elf, toml_file
from kernel_builder.hub.content import RemoteFile
from kernel_builder.hub.remote_repository import RemoteRepository
from kernel_builder.limits import within_limits
from kernel_format.errors import HubError, VerificationError
from kernel_format.metadata import TEXT_BYTES
from kernel_format.untrusted_paths import UnsafePath, checked_text

_REDIRECT = "kernel-status.toml"  # in a revision: redirects the client to another repository
BINARY = re.compile(r"\.so(\.\d+)*$")
_BLOCK = 2 << 10  # bytes; a header of device code is smaller
_GAP = 16 << 10  # bytes between two sections that are downloaded together
SMALL = 256 << 10  # bytes of a file that is downloaded whole
_LARGE = 1 << 20  # bytes of a section of constants that is left out, and the most of a file that is read as text
_LARGEST_PART = 64 << 20  # bytes of a file that are read at once
_SECTIONS = re.compile(r"\.(dynamic|dynsym|dynstr|gnu\.version(_r|_d)?|comment|shstrtab|rodata.*)")
_HEADER = struct.Struct("<40xQ10xHHH")  # Elf64_Ehdr: offset, size, number of section headers, index of their names
_NAMES = struct.Struct("<24xQQ24x")  # Elf64_Shdr: ..., offset, size, ...
_AT_ONCE = 8


def package_files(repository: RemoteRepository, commit: str) -> dict[str, RemoteFile]:
    """Return the files in `build/`, or raise an error if the revision redirects clients to another repository."""
    files = repository.files(commit)
    status = files.get(_REDIRECT)
    if status is None:
        return {path: remote for path, remote in files.items() if path.startswith("build/")}
    where = repository.at(commit)
    _check_size(f"{where}: {_REDIRECT}", status.size, TEXT_BYTES)
    data = repository.read_range(commit, _REDIRECT, 0, status.size)
    content = toml_file.parse(toml_file.decode(data, f"{where}: {_REDIRECT}"), f"{where}: {_REDIRECT}")
    try:
        destination, revision = checked_text(content.get("destination")), checked_text(content.get("revision", "main"))
    except UnsafePath as error:
        raise VerificationError(f"{_REDIRECT} has no valid `destination`: {error}", where=where) from error
    raise HubError(
        f"the repository redirects clients to {destination}", where=where, hint=f"use {destination}@{revision}"
    )


def _check_size(where: str, size: int, most: int) -> None:
    """Refuse to read more bytes of a Hub into memory."""
    if size > most:
        raise VerificationError(f"{size} bytes are too many to read; expected at most {most}", where=where)


class PartialFile:
    """A file of a revision whose parts are downloaded when they are first read."""

    def __init__(self, repository: RemoteRepository, revision: str, path: str, size: int, copy: Path) -> None:
        self._repository, self._revision, self._path, self._size = repository, revision, path, size
        self._copy = copy
        self._present: set[int] = set()  # blocks
        self._lock = Lock()
        self.received = 0  # bytes
        copy.parent.mkdir(parents=True, exist_ok=True)
        with copy.open("wb") as file:
            file.truncate(size)

    def read_at(self, offset: int, length: int) -> bytes:
        """Return bytes of the file; fewer at its end."""
        stop = min(offset + length, self._size)
        _check_size(f"{self._repository.at(self._revision)}: {self._path}", stop - offset, _LARGEST_PART)
        missing = [block for block in range(offset // _BLOCK, -(-stop // _BLOCK)) if block not in self._present]
        if missing:
            self._download(missing[0] * _BLOCK, min((missing[-1] + 1) * _BLOCK, self._size))
        with self._copy.open("rb") as file:
            return os.pread(file.fileno(), max(stop - offset, 0), offset)

    def _download(self, start: int, stop: int) -> None:
        data = self._repository.read_range(self._revision, self._path, start, stop)
        with self._copy.open("r+b") as file, self._lock:
            os.pwrite(file.fileno(), data, start)
            self._present |= {*range(start // _BLOCK, -(-(start + len(data)) // _BLOCK))}
            self.received += len(data)


def download(repository: RemoteRepository, revision: str, files: Mapping[str, RemoteFile], directory: Path) -> int:
    """Write copies of files to a directory, of binaries only the parts that static checks read, within limits.

    Large files of other kinds have no content. Equal files are downloaded once.

    Returns:
        The number of bytes that were downloaded.
    """
    by_content: dict[str, list[str]] = {}
    for path, remote in files.items():
        by_content.setdefault(remote.identity, []).append(path)

    def fetch(paths: list[str]) -> int:
        size = files[paths[0]].size
        first = directory / paths[0]
        if any(path.endswith((".py", ".json")) for path in paths):
            _check_size(f"{repository.at(revision)}: {paths[0]}", size, _LARGE)
        file = PartialFile(repository, revision, paths[0], size, first)
        if size <= SMALL or first.suffix == ".py":
            file.read_at(0, size)
        elif BINARY.search(paths[0]):
            with suppress(elf.Unreadable):  # a check reports it
                _read_binary(file, first)
        for other in paths[1:]:
            (directory / other).parent.mkdir(parents=True, exist_ok=True)
            (directory / other).hardlink_to(first)
        return file.received

    def fetch_all() -> int:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return sum(pool.map(fetch, by_content.values()))

    packages = {path.split("/")[1] for path in files}
    return within_limits(fetch_all, repository.at(revision), max(len(packages), 1))


def _read_binary(file: PartialFile, copy: Path) -> None:
    """Download the headers and tables of an ELF file, and the headers of its device code."""
    try:
        start, entry, number, names = _HEADER.unpack(file.read_at(0, _HEADER.size))
        table = file.read_at(start, entry * number)
        offset, size = _NAMES.unpack_from(table, entry * names)
    except struct.error:
        return
    file.read_at(offset, size)
    sections = elf.sections(copy)
    runs: list[tuple[int, int]] = []
    for section in sorted(sections, key=lambda section: section.offset):
        if _SECTIONS.fullmatch(section.name) and section.size <= _LARGE:
            begin = runs.pop()[0] if runs and section.offset - runs[-1][1] <= _GAP else section.offset
            runs.append((begin, section.offset + section.size))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda run: file.read_at(run[0], run[1] - run[0]), runs))
    for backend in backends.every():
        backend.device_code(copy, file.read_at)
