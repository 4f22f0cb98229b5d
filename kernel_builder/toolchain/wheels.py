"""Reads byte ranges of a wheel without its zip directory, and checks the files against the wheel's `RECORD`.

Each member of a zip file follows a local header with its name and sizes, so a range of whole members can be read on its
own. The directory at the end of the file, a megabyte for a Torch wheel, need not be downloaded. This requires sizes in
the local headers (general purpose flag bit 3 clear); `toolchain update` checks that when it pins a wheel.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from kernel_format.untrusted_paths import UnsafePath, checked_path

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_SIGNATURE = b"PK\x03\x04"
_STORED, _DEFLATED = 0, 8


class CorruptDownload(ValueError):
    """Bytes of a wheel differ from its `RECORD` or from the lock. The message names the file and both values."""


@dataclass(frozen=True)
class WheelMember:
    """One file of a wheel, still compressed."""

    name: str
    method: int
    compressed: memoryview
    size: int

    def content(self) -> bytes:
        """Return the decompressed bytes."""
        try:
            if self.method == _STORED:
                data = bytes(self.compressed)
            elif self.method == _DEFLATED:
                data = zlib.decompress(self.compressed, -zlib.MAX_WBITS, bufsize=max(self.size, 1))
            else:
                raise CorruptDownload(f"{self.name}: unknown compression method {self.method}")
        except zlib.error as error:
            raise CorruptDownload(f"{self.name}: does not decompress: {error}") from error
        if len(data) != self.size:
            raise CorruptDownload(f"{self.name}: has {len(data)} bytes, expected {self.size}")
        return data


def members(data: memoryview) -> Iterator[WheelMember]:
    """Yield the files in a range of whole zip members, in order, without directories."""
    position = 0
    while position < len(data):
        if len(data) - position < _LOCAL_HEADER.size:
            raise CorruptDownload(f"ends within a zip header at byte {position}")
        header = _LOCAL_HEADER.unpack_from(data, position)
        signature, _, flags, method, _, _, _, compressed_size, size, name_length, extra_length = header
        if signature != _SIGNATURE or flags & 0x8:
            raise CorruptDownload(f"has no usable zip member at byte {position}")
        name_start = position + _LOCAL_HEADER.size
        start = name_start + name_length + extra_length
        position = start + compressed_size
        if position > len(data):
            raise CorruptDownload(f"ends within a zip member that started at byte {name_start - _LOCAL_HEADER.size}")
        name = bytes(data[name_start : name_start + name_length]).decode("utf-8", "replace")
        if not name.endswith("/"):
            yield WheelMember(name, method, data[start:position], size)


def parse_record(text: str) -> Mapping[str, str]:
    """Return file name -> SHA-256 in hex from a `RECORD`. Files without a hash (`RECORD`, signatures) are left out."""
    hashes = {}
    for row in csv.reader(text.splitlines()):
        name, stated, *_ = [*row, "", ""]
        algorithm, _, digest = stated.partition("=")
        if algorithm == "sha256":
            hashes[name] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    return hashes


def _is_record(name: str) -> bool:
    path = PurePosixPath(name)
    return path.name == "RECORD" and path.parent.name.endswith(".dist-info") and len(path.parts) == 2


def checked(
    slices: Iterable[memoryview], record_sha256: str, prefix: str, keep: Callable[[str], bool]
) -> Iterator[tuple[str, bytes]]:
    """Yield the selected files of a wheel, checked against its `RECORD`, and `RECORD` against the lock.

    Args:
        slices: Ranges of whole members that together hold `RECORD` and the files.
        record_sha256: The SHA-256 of `RECORD` that the lock pins.
        prefix: A directory in the wheel, with a slash at its end. Files outside of it are left out.
        keep: Whether a file, named relative to `prefix`, is wanted.

    Yields:
        The name relative to `prefix`, and the content.
    """
    entries = [member for data in slices for member in members(data)]
    record = next((member.content() for member in entries if _is_record(member.name)), None)
    if record is None:
        raise CorruptDownload("has no RECORD in the ranges that the lock names")
    got = hashlib.sha256(record).hexdigest()
    if got != record_sha256:
        raise CorruptDownload(f"RECORD has SHA-256 {got}, expected {record_sha256}")
    expected = parse_record(record.decode("utf-8", "replace"))
    for member in entries:
        if not member.name.startswith(prefix):
            continue
        name = member.name.removeprefix(prefix)
        if not keep(name):
            continue
        try:
            checked_path(name)
        except UnsafePath as error:
            raise CorruptDownload(f"leads out of {prefix}: {error}") from error
        content = member.content()
        got = hashlib.sha256(content).hexdigest()
        if got != expected.get(member.name):
            raise CorruptDownload(f"{member.name} has SHA-256 {got}, expected {expected.get(member.name, 'none')}")
        yield name, content
