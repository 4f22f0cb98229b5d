"""Reading the body of a commit: lines of JSON, of which some carry a whole file as base64."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable

from kernel_hub.refusals import bad_request, too_large
from kernel_hub.repositories.index import Claim
from kernel_hub.settings import RequestLimits
from kernel_hub.storage.large_files import IncomingFile

_CONTENT = re.compile(rb'"content"\s*:\s*"')
_LONG = 64 << 10

AddLine = Callable[[bytes, "IncomingFile | None"], None]


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
        self._file: IncomingFile | None = None
        self._undecoded = b""
        self._is_open = False

    def feed(self, block: bytes) -> None:
        """Read a block, in a thread: it may have very many lines.

        Raises:
            Refusal: If a content or the body is too large, or a long line has no content in base64.
        """
        self._received += len(block)
        if self._received > (most := self._limits.commit_bytes):
            raise too_large(f"the commit is larger than {most} bytes; upload its large files first, by LFS")
        start = 0
        while start < len(block):  # by position: a copy of the remainder for each line takes seconds
            found = block.find(b'"' if self._is_open else b"\n", start)
            end = len(block) if found < 0 else found
            part = block[start:end]
            start = end + 1
            if self._is_open and self._file is not None:
                self._decode(self._file, part, last=found >= 0)
                self._is_open = found < 0
                self._line += block[end:start]
                continue
            self._line += part
            if found >= 0:
                self.end()
            elif len(self._line) > _LONG:
                opening = _CONTENT.search(self._line)
                if opening is None or self._file is not None:
                    raise too_large(f"a line of the commit is longer than {_LONG} bytes without a file's content")
                self._file, self._is_open = self._new_file(), True
                block, start = bytes(self._line[opening.end() :]), 0
                del self._line[opening.end() :]

    def _decode(self, file: IncomingFile, encoded: bytes, *, last: bool) -> None:
        encoded = self._undecoded + encoded
        whole = len(encoded) if last else len(encoded) // 4 * 4
        self._undecoded = encoded[whole:]
        try:
            data = base64.b64decode(encoded[:whole], validate=True)
        except binascii.Error:
            raise bad_request("the content of a long line of the commit is not base64") from None
        if file.size + len(data) > (most := self._limits.inline_file_bytes):
            raise too_large(f"a file in a commit has at most {most} bytes; upload larger files by LFS")
        self._claim(len(data))
        file.write(data)

    def end(self) -> None:
        """End a line, and at the end of the body the last one."""
        line, file = bytes(self._line), self._file
        self._line, self._file = bytearray(), None
        self._lines += 1
        if self._lines > (most := self._limits.commit_changes) + 2:  # the header, and the end of the last line
            raise too_large(f"more than {most} changes in one commit")
        if line.strip():
            self._add(line, file)
