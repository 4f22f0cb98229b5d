"""Fills a directory of the store from pinned files: downloads, checks and unpacks them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from kernel_builder.progress import Progress
from kernel_builder.toolchain import sdists, wheels
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.lock import PinnedFile, Tree
from kernel_format.errors import FetchError


def fill(tree: Tree, index: Index, scratch: Path, directory: Path, progress: Progress) -> None:
    """Download the byte ranges that a tree needs, check them, and unpack them.

    Args:
        scratch: Keeps complete and partial downloads between attempts.
        directory: An empty directory; an error may leave it half filled.
    """
    total, before = tree.download, 0
    for pin in tree.files:
        for start, stop in pin.ranges:
            offset = before

            def report(done: int, offset: int = offset) -> None:
                progress.advance(tree.title, offset + done, total, unit="bytes")

            index.fetch(pin, start, stop, _part(scratch, pin, start, stop), report)
            before += stop - start
    for pin in tree.files:
        try:
            unpack(pin, [map_file(_part(scratch, pin, start, stop)) for start, stop in pin.ranges], directory)
        except wheels.CorruptDownload as error:
            for start, stop in pin.ranges:
                _part(scratch, pin, start, stop).unlink()
            raise FetchError(
                f"the download differs from the lock: {error}",
                where=f"{pin.file} at {index.url}",
                hint="try again; if the error stays, the index or a proxy alters files: set PIP_INDEX_URL to "
                "another index",
            ) from error


def _part(scratch: Path, pin: PinnedFile, start: int, stop: int) -> Path:
    # With the digest in the name, a partial download of a different file is never continued.
    return scratch / f"{pin.project}-{pin.sha256[:16]}-{start}-{stop}.part"


def map_file(path: Path) -> memoryview:
    """Map a file into memory."""
    with path.open("rb") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))


def unpack(pin: PinnedFile, slices: Sequence[memoryview], directory: Path) -> None:
    """Write the kept files of one pinned file.

    Args:
        slices: The bytes of the file's ranges, in order.
    """

    def keep(name: str) -> bool:
        return name.startswith(pin.take)

    if pin.record is None:
        files = sdists.checked(slices[0], pin.sha256, pin.prefix, keep)
    else:
        files = wheels.checked(slices, pin.record, pin.prefix, keep)
    for name, content in files:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        # Only the zip directory has the executable bit, and it is not downloaded.
        if (path.parent.name == "bin" or name == "zig") and content.startswith((b"\x7fELF", b"#!")):
            path.chmod(0o755)
