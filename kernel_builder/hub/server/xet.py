"""The upload protocol of newer clients, Xet: files as ranges of chunks in containers ("xorbs").

`huggingface_hub` 2 sends large files in no other way where `hf_xet` is installed. Here every file is put together as
soon as it is described, checked against its SHA-256, and kept as a large file like any other; it is read as those are,
so Xet is not offered for reading.

The clients remember for three weeks which chunks they sent to which address, and do not send them again. So xorbs are
kept for a while after their last use. Each organisation has its own, at an address of its own: nobody can refer to what
others sent, and a Hub that begins anew at the same port is another address.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import IO, Annotated, Any

import lz4.frame  # type: ignore[import-untyped]
from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import JSONResponse

from kernel_builder.hub.server import names
from kernel_builder.hub.server.api import RepoId, TheCaller, TheHub, base_url, hub_of
from kernel_builder.hub.server.hub import Hub
from kernel_builder.hub.server.receive import Slots, blocks
from kernel_builder.hub.server.refusals import bad_request, too_large, wrong_token

router = APIRouter()

TOKEN_SECONDS = 3600
XORB_BYTES = 80 << 20
SHARD_BYTES = 64 << 20
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
    """A file as a shard describes it."""

    sha256: str
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return sum(segment.size for segment in self.segments)


def read_shard(data: bytes) -> list[File]:
    """The files that a shard describes.

    Raises:
        Refusal: These bytes are not a shard.
    """
    try:
        if not data.startswith(_TAG) or struct.unpack_from("<Q", data, 32)[0] != 2:
            raise ValueError("the header is unknown")
        files = []
        offset = _HEADER
        while (record := _record(data, offset))[:32] != _BOOKEND:
            flags, count = struct.unpack_from("<II", record, 32)
            offset += _RECORD
            if not flags & _WITH_METADATA:
                raise ValueError("a file comes without its SHA-256")
            segments = []
            for number in range(count):
                entry = _record(data, offset + number * _RECORD)
                _, size, start, end = struct.unpack_from("<IIII", entry, 32)
                segments.append(Segment(_hex(entry[:32]), start, end, size))
            offset += count * _RECORD * (2 if flags & _WITH_VERIFICATION else 1)
            files.append(File(_hex(_record(data, offset)[:32]), tuple(segments)))
            offset += _RECORD
        return files
    except (ValueError, struct.error) as error:
        raise bad_request(f"this is not a shard of version 2: {error}") from None


def _record(data: bytes, offset: int) -> bytes:
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


# The routes


def _xorb_name(repo_id: str, xorb: str) -> str:
    names.sha256(xorb)
    return f"{repo_id.partition('/')[0]}/{xorb[:2]}/{xorb}"


def _store(hub: Hub, repo_id: str) -> str:
    """What the clients remember with the chunks that they sent: this root, and the organisation."""
    return hub.signature(b"xet store\n" + repo_id.partition("/")[0].encode())[:16]


def _sign(hub: Hub, payload: bytes) -> str:
    return hub.signature(b"xet\n" + payload)


def repository_of(request: Request) -> str:
    """The repository that a write token of ours is for."""
    hub = hub_of(request)
    payload, _, signature = request.headers.get("authorization", "").removeprefix("Bearer ").partition(".")
    try:
        decoded = base64.urlsafe_b64decode(payload)
        if not hmac.compare_digest(_sign(hub, decoded).encode(), signature.encode()):
            raise wrong_token()
        claims = json.loads(decoded)
    except ValueError:
        raise wrong_token() from None
    if claims["expires"] < time.time():
        raise wrong_token()
    return str(claims["repository"])


WrittenRepository = Annotated[str, Depends(repository_of)]


@router.get("/api/kernels/{organization}/{name}/xet-write-token/{revision:path}")
def write_token(repo_id: RepoId, request: Request, hub: TheHub, caller: TheCaller) -> JSONResponse:
    """Where to send xorbs and shards, and a token for that."""
    hub.to_write(repo_id, caller)
    expires = int(time.time()) + TOKEN_SECONDS
    payload = json.dumps({"repository": repo_id, "expires": expires}).encode()
    token = f"{base64.urlsafe_b64encode(payload).decode()}.{_sign(hub, payload)}"
    url = f"{base_url(request)}/xet/{_store(hub, repo_id)}"
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expires)}
    return JSONResponse({"casUrl": url, "accessToken": token, "exp": expires}, headers=headers)


_BINARY: dict[str, Any] = {
    "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}


@router.post("/xet/{store}/v1/xorbs/{prefix}/{xorb}", openapi_extra=_BINARY)
async def receive_xorb(
    prefix: str, xorb: str, repo_id: WrittenRepository, request: Request, hub: TheHub
) -> dict[str, bool]:
    """Take in a xorb. What it holds is checked when a file is put together from it."""
    xorbs = hub.xorbs
    name = _xorb_name(repo_id, xorb)
    slots: Slots = request.app.state.upload_slots
    path = xorbs.new()
    with slots.one():
        try:
            with path.open("xb") as file:
                received = 0
                async for block in blocks(request):
                    received += len(block)
                    if received > XORB_BYTES:
                        raise too_large(f"a xorb has at most {XORB_BYTES} bytes")
                    await to_thread.run_sync(file.write, block)
                file.flush()
                await to_thread.run_sync(os.fsync, file.fileno())
            await to_thread.run_sync(xorbs.put, path, name)
        finally:
            path.unlink(missing_ok=True)
    return {"was_inserted": True}


@router.post("/xet/{store}/v1/shards", openapi_extra=_BINARY)
async def receive_shard(repo_id: WrittenRepository, request: Request, hub: TheHub) -> dict[str, int]:
    """Put together the files that a shard describes, and keep those that are what they should be."""
    data = bytearray()
    async for block in blocks(request):
        data += block
        if len(data) > SHARD_BYTES:
            raise too_large(f"a shard has at most {SHARD_BYTES} bytes")
    files = read_shard(bytes(data))
    new = await to_thread.run_sync(_assemble, hub, repo_id, files)
    request.app.state.measures.received(new)
    return {"result": 1}


@router.post("/v1/telemetry")
def telemetry() -> Response:
    """The clients report their speed; it is not kept."""
    return Response(status_code=204)


def _assemble(hub: Hub, repo_id: str, files: list[File]) -> int:
    repository = hub.repositories.open(repo_id)
    limit = hub.settings.limits.file_bytes
    xorbs = hub.xorbs
    with ExitStack() as opened:
        found: dict[str, Xorb] = {}

        def xorb(name: str) -> Xorb:
            if name not in found:
                key = _xorb_name(repo_id, name)
                try:
                    xorbs.used(key)
                    found[name] = Xorb(name, opened.enter_context(xorbs.on_this_machine(key)))
                except FileNotFoundError:
                    raise bad_request(
                        f"the xorb {name} is not on this Hub, though your client remembers that it sent it: "
                        "remove the directory xet in its cache ($HF_HOME/xet), or set HF_HUB_DISABLE_XET=1"
                    ) from None
            return found[name]

        made = []
        for file in {file.sha256: file for file in files}.values():
            if file.size > limit:
                raise too_large(f"{file.size} bytes; this Hub takes files up to {limit}")
            if repository.owns(file.sha256) and hub.large_files.size(file.sha256) == file.size:
                continue
            incoming = opened.enter_context(hub.large_files.receive(file.sha256, file.size))
            for segment in file.segments:
                for data in xorb(segment.xorb).read(segment.start, segment.end):
                    incoming.write(data)
            incoming.seal()
            made.append(incoming)
        hub.keep(repository, made)
    return sum(incoming.size for incoming in made)
