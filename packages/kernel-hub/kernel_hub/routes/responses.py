"""Responses that carry a file, whole or a range of it, with the headers that the clients read; addresses and times."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import IO
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kernel_hub.git.objects import TreeEntry
from kernel_hub.git.repository import GitRepository
from kernel_hub.hub_service import Hub
from kernel_hub.refusals import Refusal, no_entry

BLOCK = 256 << 10
_LAST_SECOND = int(datetime(9999, 12, 31, tzinfo=timezone.utc).timestamp())

# Files are untrusted: none of them may run scripts in a reader's browser.
_SANDBOX = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"


def content_response(request: Request, hub: Hub, repository: GitRepository, entry: TreeEntry, commit: str) -> Response:
    """Return a file, or the requested range of it.

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
    if entry.large is not None:
        stored = hub.large_files.size(entry.large.sha256) if entry.large.sha256 in repository.owned else None
        if stored != size:
            raise no_entry(entry.path, commit)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    request.app.state.metrics.sent.inc(end - start)
    if entry.large is None:
        return Response(repository.revisions.read(entry)[start:end], status_code=status, headers=headers)
    file = hub.large_files.path(entry.large.sha256).open("rb")
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
        message = f"the range {asked[0]} lies outside of the file's {size} bytes"
        raise Refusal(416, message, code="RangeNotSatisfiable", headers={"Content-Range": f"bytes */{size}"})
    return start, end


def _blocks(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    """Yield a range of a file."""
    with file:
        file.seek(start)
        while start < end:
            block = file.read(min(BLOCK, end - start))
            if not block:
                raise OSError("a large file is shorter than its size; run `kernel-hub check`")
            start += len(block)
            yield block


def base_url(request: Request) -> str:
    """Return the address under which this client reaches the Hub."""
    return str(request.base_url).rstrip("/")


def next_page(request: Request, response: Response, **parameters: object) -> None:
    """Add the address of the next page to an answer, as the clients expect it."""
    url = request.url.include_query_params(**parameters)
    path = quote(request.scope["raw_path"].decode("ascii"), safe="/%") if "raw_path" in request.scope else url.path
    response.headers["Link"] = f'<{base_url(request)}{path}?{url.query}>; rel="next"'


def timestamp(seconds: int) -> str:
    """Format a time, in seconds since 1970, as the clients parse it. Pushed commits may have any."""
    moment = datetime.fromtimestamp(min(max(seconds, 0), _LAST_SECOND), timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")
