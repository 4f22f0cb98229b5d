"""What the clients' upload protocol Xet is written in: files as ranges of chunks in containers ("xorbs").

A shard describes files, a xorb holds chunks. Both come from outside, so nothing in them is believed before it is looked
at.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import IO

import lz4.frame  # type: ignore[import-untyped]

from kernel_builder.server.refusals import bad_request

Shard = bytes | mmap.mmap

CHUNK_BYTES = 1 << 20
XORB_CHUNKS = 1 << 16

_HEADER = 48
_RECORD = 48
_BOOKEND = b"\xff" * 32
_TAG = b"HFRepoMetaData\0"
_WITH_VERIFICATION = 1 << 31
_WITH_METADATA = 1 << 30


@dataclass(frozen=True)
class Segment:
    """A part of a file: a range of a xorb's chunks, and how many bytes they are."""

    xorb: str
    start: int
    end: int
    size: int


@dataclass(frozen=True)
class File:
    """A file as a shard describes it: its SHA-256, its bytes, and where in the shard its segments are listed."""

    sha256: str
    size: int
    shard: Shard
    first: int
    count: int

    def segments(self) -> Iterator[Segment]:
        """What it is put together from, in order; read as it is asked for, since there may be a million."""
        return _segments(self.shard, self.first, self.count)


def read_shard(shard: Shard) -> Iterator[File]:
    """The files that a shard describes, one after the other.

    Raises:
        Refusal: These bytes are not a shard.
    """
    try:
        if shard[: len(_TAG)] != _TAG or struct.unpack_from("<Q", shard, 32)[0] != 2:
            raise ValueError("the header is unknown")
        offset = _HEADER
        while (record := _record(shard, offset))[:32] != _BOOKEND:
            flags, count = struct.unpack_from("<II", record, 32)
            if not flags & _WITH_METADATA:
                raise ValueError("a file comes without its SHA-256")
            first = offset + _RECORD
            offset = first + count * _RECORD * (2 if flags & _WITH_VERIFICATION else 1)
            sha256 = _hex(_record(shard, offset)[:32])  # so all of the segments are there
            size = sum(segment.size for segment in _segments(shard, first, count))
            yield File(sha256, size, shard, first, count)
            offset += _RECORD
    except (ValueError, struct.error) as error:
        raise bad_request(f"this is not a shard of version 2: {error}") from None


def _segments(shard: Shard, first: int, count: int) -> Iterator[Segment]:
    for offset in range(first, first + count * _RECORD, _RECORD):
        _, size, start, end = struct.unpack_from("<IIII", shard, offset + 32)
        yield Segment(_hex(shard[offset : offset + 32]), start, end, size)


def _record(data: Shard, offset: int) -> bytes:
    record = data[offset : offset + _RECORD]
    if len(record) < _RECORD:
        raise ValueError("it ends too early")
    return record


def _hex(value: bytes) -> str:
    """A hash as it is written: four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", value))


@dataclass(frozen=True)
class _Chunk:
    offset: int
    packed: int
    scheme: int
    size: int


class Xorb:
    """A xorb, opened: its chunks, found by their headers."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name = name
        self._file = file
        self._chunks = list(islice(self._scan(), XORB_CHUNKS))

    def _scan(self) -> Iterator[_Chunk]:
        offset = 0
        while len(header := self._file.read(8)) == 8 and header[0] == 0:
            packed, scheme, size = (
                int.from_bytes(header[1:4], "little"),
                header[4],
                int.from_bytes(header[5:8], "little"),
            )
            yield _Chunk(offset + 8, packed, scheme, size)
            offset += 8 + packed
            self._file.seek(offset)

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes of a range of chunks."""
        if not 0 <= start < end <= len(self._chunks):
            raise bad_request(f"the xorb {self._name} has {len(self._chunks)} chunks; {start} to {end} were asked for")
        for chunk in self._chunks[start:end]:
            self._file.seek(chunk.offset)
            yield self._unpacked(chunk, self._file.read(chunk.packed))

    def _unpacked(self, chunk: _Chunk, packed: bytes) -> bytes:
        if chunk.size > CHUNK_BYTES:
            raise bad_request(
                f"the xorb {self._name} has a chunk of {chunk.size} bytes; at most {CHUNK_BYTES} are read"
            )
        try:
            if chunk.scheme == 0:
                data = packed
            elif chunk.scheme in {1, 2}:
                data = lz4.frame.LZ4FrameDecompressor().decompress(packed, max_length=chunk.size + 1)
            else:
                raise ValueError(f"unknown compression {chunk.scheme}")
        except (RuntimeError, ValueError, EOFError) as error:
            raise bad_request(f"the xorb {self._name} cannot be unpacked: {error}") from None
        if len(data) != chunk.size:
            raise bad_request(f"the xorb {self._name} has a chunk that is not of the size that it says")
        return _ungrouped(data) if chunk.scheme == 2 else data


def _ungrouped(data: bytes) -> bytes:
    """Undo the grouping of bytes by their place in a word of four."""
    whole = bytearray(len(data))
    offset = 0
    for place in range(4):
        count = (len(data) - place + 3) // 4
        whole[place::4] = data[offset : offset + count]
        offset += count
    return bytes(whole)
