"""Answers that carry a file, whole or a range of it, with the headers that the clients read."""

from __future__ import annotations

import asyncio
import io
import mimetypes
import os
import re
from collections.abc import AsyncIterator
from pathlib import PurePosixPath
from typing import IO
from urllib.parse import quote

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kernel_hub.git.objects import TreeEntry
from kernel_hub.git.repository import GitRepository
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal, no_entry

BLOCK = 64 << 10
IN_MEMORY = 64 << 10

# Files are untrusted: none of them may run scripts in a reader's browser.
_SANDBOX = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"


def content_response(request: Request, hub: Hub, repository: GitRepository, entry: TreeEntry, commit: str) -> Response:
    """Answer with a file, or with the range of it that was requested.

    Args:
        commit: The revision, for the headers; empty if the file was addressed by its digest.

    Raises:
        Refusal: If the range lies outside of the file, or a large file is not in the store.
    """
    size = entry.content_size
    etag = f'"{entry.large.sha256 if entry.large else entry.oid}"'
    name = PurePosixPath(entry.path).name
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Disposition": f"inline; filename*=UTF-8''{quote(name)}",
        "Content-Security-Policy": _SANDBOX,
        "Content-Type": _media_type(name, large=entry.large is not None),
        "ETag": etag,
        "X-Content-Type-Options": "nosniff",
        "X-Linked-Etag": etag,
        "X-Linked-Size": str(size),
    }
    if commit:
        headers["X-Repo-Commit"] = commit
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    start, end = _range(request, size, etag)
    status = 200
    if (start, end) != (0, size):
        status = 206
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    headers["Content-Length"] = str(end - start)
    absent = False
    if entry.large is not None:
        stored = hub.large_files.size(entry.large.sha256) if entry.large.sha256 in repository.owned else None
        absent = stored != size
        if absent and (hub.mirror is None or repository.mirror_of is None or not commit):
            raise no_entry(entry.path, commit)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    request.app.state.metrics.sent(end - start)
    if absent and hub.mirror is not None and entry.large is not None:
        download, arriving = hub.mirror.downloads.open(repository.repo_id, commit, entry.path, entry.large)
        return StreamingResponse(download.blocks(arriving, start, end), status_code=status, headers=headers)
    if entry.large is not None:
        file = hub.large_files.open(entry.large.sha256)
    elif entry.size > IN_MEMORY:
        file = hub.spool.open(repository, entry)
    else:
        return Response(repository.trees.read(entry)[start:end], status_code=status, headers=headers)
    return StreamingResponse(_blocks(file, start, end), status_code=status, headers=headers)


def _media_type(name: str, *, large: bool) -> str:
    kind, encoding = mimetypes.guess_type(name)
    if kind and not encoding and kind.startswith("image/"):
        return kind
    return "application/octet-stream" if large else "text/plain; charset=utf-8"


def _range(request: Request, size: int, etag: str) -> tuple[int, int]:
    """Return the start and end of the requested range. Several ranges in one request get the whole file."""
    asked = re.fullmatch(r"bytes=(\d{0,19})-(\d{0,19})", request.headers.get("range", "").replace(" ", ""))
    if not asked or asked[0] == "bytes=-" or request.headers.get("if-range", etag) != etag:
        return 0, size
    first, last = asked[1], asked[2]
    if first:
        start, end = int(first), min(int(last) + 1, size) if last else size
    else:
        start, end = max(0, size - int(last)), size
    if start >= end:
        raise Refusal(
            416,
            f"the range {asked[0]} lies outside of the file's {size} bytes",
            code="RangeNotSatisfiable",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return start, end


async def _blocks(file: IO[bytes], start: int, end: int) -> AsyncIterator[memoryview]:
    """Yield a range of a file. A reader that stalls keeps two blocks in memory: one sent, and one read ahead."""
    source = _LocalFile(file) if isinstance(file, io.BufferedReader) else _OtherFile(file)
    try:
        while start < end:
            block = await source.read(start, min(BLOCK, end - start))
            if not block:
                raise OSError("a large file is shorter than its size; run `kernel-builder hub check`")
            start += len(block)
            yield block
    finally:
        file.close()


class _LocalFile:
    """Reads a file of this machine: what the page cache holds at once, the rest in a thread."""

    def __init__(self, file: IO[bytes]) -> None:
        self._descriptor = file.fileno()

    async def read(self, start: int, size: int) -> memoryview:
        block = memoryview(bytearray(size))
        try:
            read = os.preadv(self._descriptor, [block], start, os.RWF_NOWAIT)
            await asyncio.sleep(0)  # others have their turn
        except OSError:  # not cached, or the file system cannot tell
            read = await to_thread.run_sync(os.preadv, self._descriptor, [block], start)
        return block[:read]


class _OtherFile:
    """Reads a file of a remote store, or one in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    async def read(self, start: int, size: int) -> memoryview:
        def read() -> bytes:
            self._file.seek(start)
            return self._file.read(size)

        return memoryview(await to_thread.run_sync(read))
