"""The formats of the upload protocol Xet: shards describe files, xorbs are containers of chunks.

A file is a sequence of ranges of chunks in xorbs. Clients write both formats, so every field is checked before use.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import IO

import lz4.frame  # type: ignore[import-untyped]

from kernel_hub.refusals import bad_request

Shard = bytes | mmap.mmap

CHUNK_BYTES = 1 << 20
XORB_CHUNKS = 1 << 14  # twice as many as clients put into one
SMALLEST_CHUNK = 4 << 10  # half of what clients cut at least, except at the end of a file
_SMALLER_CHUNKS = 16  # of one file
XORB_UNPACKED = 128 << 20  # twice as much as clients put into one

_HEADER = 48
_RECORD = 48
_BOOKEND = b"\xff" * 32
_TAG = b"HFRepoMetaData\0"
_WITH_VERIFICATION = 1 << 31
_WITH_METADATA = 1 << 30


@dataclass(frozen=True)
class ChunkRange:
    """A part of a file: a range of a xorb's chunks, and its size in bytes."""

    xorb: str
    start: int
    end: int
    size: int


@dataclass(frozen=True)
class XetFile:
    """A file that a shard describes: its SHA-256, its size, and where in the shard its chunk ranges are listed."""

    sha256: str
    size: int
    shard: Shard
    first: int
    count: int

    def chunk_ranges(self) -> Iterator[ChunkRange]:
        """Yield the parts of the file in order. They are parsed lazily, since there may be a million."""
        return _chunk_ranges(self.shard, self.first, self.count)


def read_shard(shard: Shard) -> Iterator[XetFile]:
    """Yield the files that a shard describes.

    Raises:
        Refusal: If the bytes are not a shard.
    """
    try:
        if shard[: len(_TAG)] != _TAG or struct.unpack_from("<Q", shard, 32)[0] != 2:
            raise ValueError("the header is unknown")
        offset = _HEADER
        while (record := _record(shard, offset))[:32] != _BOOKEND:
            flags, count = struct.unpack_from("<II", record, 32)
            if not flags & _WITH_METADATA:
                raise ValueError("a file has no SHA-256")
            first = offset + _RECORD
            offset = first + count * _RECORD * (2 if flags & _WITH_VERIFICATION else 1)
            sha256 = hash_text(_record(shard, offset)[:32])  # fails if the shard ends before the last chunk range
            yield XetFile(sha256, _size(shard, first, count), shard, first, count)
            offset += _RECORD
    except (ValueError, struct.error) as error:
        raise bad_request(f"this is not a shard of version 2: {error}") from None


def _size(shard: Shard, first: int, count: int) -> int:
    """Return the size of a file, after its chunks were counted: ranges of nothing would take as long as large files."""
    size = chunks = 0
    for part in _chunk_ranges(shard, first, count):
        if not (part.start < part.end and part.size):
            raise ValueError("a range of chunks is empty")
        size += part.size
        chunks += part.end - part.start
    if chunks > size // SMALLEST_CHUNK + _SMALLER_CHUNKS:
        raise ValueError(f"a file of {size} bytes has {chunks} chunks, which are too many for its size")
    return size


def _chunk_ranges(shard: Shard, first: int, count: int) -> Iterator[ChunkRange]:
    for offset in range(first, first + count * _RECORD, _RECORD):
        _, size, start, end = struct.unpack_from("<IIII", shard, offset + 32)
        yield ChunkRange(hash_text(shard[offset : offset + 32]), start, end, size)


def _record(data: Shard, offset: int) -> bytes:
    record = data[offset : offset + _RECORD]
    if len(record) < _RECORD:
        raise ValueError("it is truncated")
    return record


def hash_text(digest: bytes) -> str:
    """Format a hash, which is stored as four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", digest))


@dataclass(frozen=True)
class _Chunk:
    offset: int
    packed: int
    scheme: int
    size: int


class Xorb:
    """An opened xorb, indexed by its chunk headers."""

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self._name = name
        self._file = file
        self._chunks = list(islice(self._scan(), XORB_CHUNKS))

    def __len__(self) -> int:
        return len(self._chunks)

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

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of every chunk.

        Raises:
            Refusal: If one cannot be unpacked, or all of them have more than `XORB_UNPACKED` bytes.
        """
        if sum(chunk.size for chunk in self._chunks) > XORB_UNPACKED:
            raise bad_request(f"the xorb {self._name} has more than {XORB_UNPACKED} bytes when it is unpacked")
        return self.read(0, len(self._chunks))

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a range of chunks.

        Raises:
            Refusal: If the xorb lacks some of them, or one cannot be unpacked.
        """
        if not 0 <= start < end <= len(self._chunks):
            raise bad_request(
                f"the xorb {self._name} has {len(self._chunks)} chunks; the shard refers to {start} to {end}"
            )
        for chunk in self._chunks[start:end]:
            self._file.seek(chunk.offset)
            yield self._unpacked(chunk, self._file.read(chunk.packed))

    def _unpacked(self, chunk: _Chunk, packed: bytes) -> bytes:
        if not 0 < chunk.size <= CHUNK_BYTES:
            raise bad_request(f"the xorb {self._name} has a chunk of {chunk.size} bytes; expected 1 to {CHUNK_BYTES}")
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
            raise bad_request(f"the xorb {self._name} has a chunk whose size differs from its header")
        return _ungrouped(data) if chunk.scheme == 2 else data


def _ungrouped(data: bytes) -> bytes:
    """Undo the grouping of bytes by their position in 4-byte words."""
    whole = bytearray(len(data))
    offset = 0
    for place in range(4):
        count = (len(data) - place + 3) // 4
        whole[place::4] = data[offset : offset + count]
        offset += count
    return bytes(whole)
