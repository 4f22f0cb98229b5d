"""Large files of another Hub, stored while they are sent to those who ask for them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from threading import Lock, Thread
from typing import IO

import anyio
from anyio import to_thread

from kernel_hub.git.objects import LargeFile
from kernel_hub.git.repository import GitRepository
from kernel_hub.mirror.upstream import Upstream, UpstreamError
from kernel_hub.refusals import Refusal, busy, not_mirrored
from kernel_hub.repositories.allowances import Allowances
from kernel_hub.repositories.store import RepositoryStore
from kernel_hub.storage.large_files import IncomingFile, LargeFiles
from kernel_hub.storage.locks import patiently

log = logging.getLogger("kernel_hub")

AT_ONCE = 8  # at most half of the readers wait for the other Hub to begin
BLOCK = 256 << 10
PATIENCE_SECONDS, SLOWEST = 60.0, 10_000  # bytes in a second: slower ones would keep the places of others
_POLL_SECONDS = 0.02

Keep = Callable[[GitRepository, Sequence[IncomingFile]], None]


class Download:
    """A large file that is being copied. Its last block is not readable until the file's digest was compared."""

    def __init__(self, incoming: IncomingFile) -> None:
        self._size = incoming.size
        self._file = incoming.path.open("rb")
        self.received = 0
        self.error: str | None = None
        self.finished = False

    def open(self) -> IO[bytes]:
        """Open what has arrived, and what will. Each reader has a position of its own."""
        # By its descriptor, since the store may have given the file another name.
        return Path(f"/proc/self/fd/{self._file.fileno()}").open("rb")

    async def blocks(self, file: IO[bytes], start: int, end: int) -> AsyncIterator[bytes]:
        """Yield a range of the file as it arrives.

        Raises:
            OSError: If it could not be copied. The connection then ends early, which clients take for an error.
        """
        with file:
            while start < end:
                if self.error is not None:
                    raise OSError(self.error)
                ready = self._size if self.finished else min(self.received, self._size - BLOCK)
                block = b""
                if start < ready:
                    wanted = min(BLOCK, end - start, ready - start)
                    block = await to_thread.run_sync(os.pread, file.fileno(), wanted, start)
                if block:
                    start += len(block)
                    yield block
                else:
                    await anyio.sleep(_POLL_SECONDS)


class Downloads:
    """The large files that one server is copying; each once, for any number of readers."""

    def __init__(
        self,
        upstream: Upstream,
        repositories: RepositoryStore,
        large_files: LargeFiles,
        allowances: Allowances,
        keep: Keep,
    ) -> None:
        self._upstream = upstream
        self._repositories = repositories
        self._large_files = large_files
        self._allowances = allowances
        self._keep = keep
        self._running: dict[tuple[str, str], Download] = {}
        self._lock = Lock()

    def open(self, repo_id: str, commit: str, path: str, large: LargeFile) -> tuple[Download, IO[bytes]]:
        """Begin to copy a file of a revision, or join the copying; return it, and the opened file.

        Raises:
            Refusal: If the other Hub does not send it, too many are being copied, or a quota would be exceeded.
        """
        key = (repo_id, large.sha256)
        with self._lock:
            if (download := self._running.get(key)) is not None:
                return download, download.open()
            if len(self._running) >= AT_ONCE:
                raise busy(f"{AT_ONCE} large files are being copied; try again in a few seconds")
            self._allowances.check(repo_id, large.size)
            incoming = self._large_files.receive(large.sha256, large.size)
            download = self._running[key] = Download(incoming)
            opened = download.open()
        try:
            source = self._upstream.open(repo_id, commit, path)  # here, so that a failure is an answer
        except UpstreamError as error:
            with incoming:
                self._end(key, str(error))
            raise not_mirrored(str(error)) from None
        Thread(target=self._copy, args=(key, source, incoming), daemon=True).start()
        return download, opened

    def _copy(self, key: tuple[str, str], source: HTTPResponse, incoming: IncomingFile) -> None:
        repo_id, sha256 = key
        try:
            with incoming, source, self._allowances.claim(repo_id, incoming.size):
                began, received = time.monotonic(), 0
                while block := source.read1(BLOCK):
                    incoming.write(block)
                    received += len(block)
                    self._running[key].received = received
                    if time.monotonic() - began > PATIENCE_SECONDS + received / SLOWEST:
                        raise OSError(f"the other Hub sends less than {SLOWEST} bytes in a second")
                incoming.seal()
                repository = self._repositories.open(repo_id)
                patiently(lambda: self._keep(repository, [incoming]))
        except (Refusal, HTTPException, OSError) as error:
            log.warning("the large file %s of %s was not copied: %s", sha256, repo_id, error)
            self._end(key, f"the large file {sha256} of {repo_id} was not copied: {error}")
        else:
            self._end(key)

    def _end(self, key: tuple[str, str], error: str | None = None) -> None:
        with self._lock:
            download = self._running.pop(key)
        download.error = error
        download.finished = error is None
