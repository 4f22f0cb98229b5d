"""Reading the body of a commit: lines of JSON, of which some carry a whole file as base64."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import AsyncIterator, Callable
from functools import partial

from anyio import to_thread
from starlette.requests import Request

from kernel_hub.http.receive import blocks
from kernel_hub.refusals import bad_request, too_large
from kernel_hub.storage.large_files import IncomingFile

_CONTENT = re.compile(rb'"content"\s*:\s*"')
_LONG = 64 << 10


class _Content:
    """The content of one file, which is decoded from base64 as it arrives."""

    def __init__(self, file: IncomingFile, claim: Callable[[int], None], limit: int) -> None:
        self.file = file
        self._claim = claim
        self._limit = limit
        self._rest = b""

    def write(self, encoded: bytes, *, last: bool) -> None:
        """Decode a part of the content."""
        encoded = self._rest + encoded
        whole = len(encoded) if last else len(encoded) // 4 * 4
        self._rest = encoded[whole:]
        try:
            data = base64.b64decode(encoded[:whole], validate=True)
        except binascii.Error:
            raise bad_request("the content of a long line of the commit is not base64") from None
        if self.file.size + len(data) > self._limit:
            raise too_large(f"a file in a commit has at most {self._limit} bytes; upload larger files by LFS")
        self._claim(len(data))
        self.file.write(data)


async def commit_lines(
    request: Request, new_file: Callable[[], IncomingFile], claim: Callable[[int], None], *, largest: int, total: int
) -> AsyncIterator[tuple[bytes, IncomingFile | None]]:
    """Yield the lines of a commit's body.

    The content of a long line is written to a file. The line then has an empty content, and is yielded with the file.

    Args:
        request: The request.
        new_file: Creates the file for a content.
        claim: Called with the bytes of each part of a content before they are written.
        largest: The most bytes of a content.
        total: The most bytes of the body.

    Raises:
        Refusal: If a content or the body is larger, or a long line has no content in base64.
    """
    line = bytearray()
    content: _Content | None = None
    is_open = False
    received = 0
    async for block in blocks(request):
        received += len(block)
        if received > total:
            raise too_large(f"the commit is larger than {total} bytes; upload its large files first, by LFS")
        data = block
        while data:
            part, end, data = data.partition(b'"' if is_open else b"\n")
            if is_open and content is not None:
                await to_thread.run_sync(partial(content.write, part, last=bool(end)))
                is_open = not end
                line += end
                continue
            line += part
            if end:
                if line.strip():
                    yield bytes(line), content.file if content else None
                line, content = bytearray(), None
            elif len(line) > _LONG:
                start = _CONTENT.search(line)
                if start is None or content is not None:
                    raise too_large(f"a line of the commit is longer than {_LONG} bytes without a file's content")
                content, is_open = _Content(new_file(), claim, largest), True
                data = bytes(line[start.end() :])
                del line[start.end() :]
    if line.strip():
        yield bytes(line), content.file if content else None
