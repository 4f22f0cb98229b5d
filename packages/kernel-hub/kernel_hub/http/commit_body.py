"""Reading the body of a commit: lines of JSON, of which some carry a whole file as base64."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable

from kernel_hub.refusals import bad_request, too_large
from kernel_hub.repositories.allowances import Claim
from kernel_hub.settings import RequestLimits
from kernel_hub.storage.large_files import IncomingFile

_CONTENT = re.compile(rb'"content"\s*:\s*"')
_LONG = 64 << 10

AddLine = Callable[[bytes, "IncomingFile | None"], None]


class _Content:
    """The content of one file, which is decoded from base64 as it arrives."""

    def __init__(self, file: IncomingFile, claim: Claim, limit: int) -> None:
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


class CommitBody:
    """The lines of a commit's body, which arrives in blocks.

    The content of a long line is written to a file. The line then has an empty content, and is added with the file.

    Args:
        add: Called with each line, and the file with its content.
        new_file: Creates the file for a content.
        claim: Called with the bytes of each part of a content before they are written.
        limits: The limits of a commit.
    """

    def __init__(self, add: AddLine, new_file: Callable[[], IncomingFile], claim: Claim, limits: RequestLimits) -> None:
        self._add = add
        self._new_file = new_file
        self._claim = claim
        self._limits = limits
        self._received = self._lines = 0
        self._line = bytearray()
        self._content: _Content | None = None
        self._is_open = False

    def feed(self, block: bytes) -> None:
        """Read a block, in a thread: it may have very many lines.

        Raises:
            Refusal: If a content or the body is too large, or a long line has no content in base64.
        """
        self._received += len(block)
        if self._received > (most := self._limits.commit_bytes):
            raise too_large(f"the commit is larger than {most} bytes; upload its large files first, by LFS")
        start, largest = 0, self._limits.inline_file_bytes
        while start < len(block):  # by position: a copy of the remainder for each line takes seconds
            found = block.find(b'"' if self._is_open else b"\n", start)
            end = len(block) if found < 0 else found
            part = block[start:end]
            start = end + 1
            if self._is_open and self._content is not None:
                self._content.write(part, last=found >= 0)
                self._is_open = found < 0
                self._line += block[end:start]
                continue
            self._line += part
            if found >= 0:
                self.end()
            elif len(self._line) > _LONG:
                opening = _CONTENT.search(self._line)
                if opening is None or self._content is not None:
                    raise too_large(f"a line of the commit is longer than {_LONG} bytes without a file's content")
                self._content, self._is_open = _Content(self._new_file(), self._claim, largest), True
                block, start = bytes(self._line[opening.end() :]), 0
                del self._line[opening.end() :]

    def end(self) -> None:
        """End a line, and at the end of the body the last one."""
        line, content = bytes(self._line), self._content
        self._line, self._content = bytearray(), None
        self._lines += 1
        if self._lines > (most := self._limits.commit_changes) + 2:  # the header, and the end of the last line
            raise too_large(f"more than {most} changes in one commit")
        if line.strip():
            self._add(line, content.file if content else None)
