"""Unpacks pinned files: byte ranges of wheels, without the zip directory, and whole source distributions.

Each member of a zip file follows a local header with its name and sizes, so a range of whole members can be read on its
own. The directory at the end of the file, a megabyte for a Torch wheel, need not be downloaded. This requires sizes in
the local headers (general purpose flag bit 3 clear); `toolchain update` checks that when it pins a wheel.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

from kernel_builder.toolchain.lock import PinnedFile
from kernel_format.errors import FetchError
from kernel_format.untrusted_paths import UnsafePath, checked_path

# Of a zip member: signature, version, flags, method, time, date, checksum, sizes, lengths of name and extra field.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
# The exceptions of `zipfile`, `tarfile` and the code below for damaged archives.
_DAMAGES: tuple[type[Exception], ...] = (BadZipFile, tarfile.TarError, struct.error, zlib.error, lzma.LZMAError)
_DAMAGES += (EOFError, RuntimeError, LookupError, ValueError)


@contextmanager
def reading(file: str) -> Iterator[None]:
    """Report a damaged archive as an error that names the file."""
    try:
        yield
    except _DAMAGES as error:
        raise FetchError(
            f"the archive is damaged: {error}",
            where=file,
            hint="try again; if the error stays, set PIP_INDEX_URL to another index",
        ) from error


def unpack(pin: PinnedFile, download: Path, directory: Path) -> None:
    """Write the kept files of a pinned file.

    Args:
        download: The bytes of its ranges, one range after the other.

    Raises:
        FetchError: If the bytes differ from the lock. The download is removed then.
    """
    data = download.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != pin.fetched:
        download.unlink()
        raise FetchError(
            f"the download differs from the lock: it has SHA-256 {digest}, expected {pin.fetched}",
            where=pin.file,
            hint="try again; if the error stays, the index or a proxy alters files: set PIP_INDEX_URL to another index",
        )
    with reading(pin.file):
        for name, content in _members_of_wheel(data) if pin.record else _members_of_sdist(data):
            inside = name.removeprefix(pin.prefix)
            if not name.startswith(pin.prefix) or not inside.startswith(pin.take):
                continue
            try:
                path = directory / checked_path(inside)
            except UnsafePath as error:
                raise FetchError(f"a file leads out of {pin.prefix}: {error}", where=pin.file) from error
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            # Only the zip directory has the executable bit, and it is not downloaded.
            if (path.parent.name == "bin" or inside == "zig") and content.startswith((b"\x7fELF", b"#!")):
                path.chmod(0o755)


def _members_of_wheel(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the files in whole zip members."""
    position = 0
    while position < len(data):
        header = _LOCAL_HEADER.unpack_from(data, position)
        method, packed, length, extra = header[3], header[7], *header[9:]
        start = position + _LOCAL_HEADER.size
        content = start + length + extra
        position = content + packed
        name = data[start : start + length].decode("utf-8", "replace")
        if not name.endswith("/"):
            member = memoryview(data)[content:position]
            yield name, zlib.decompress(member, -zlib.MAX_WBITS) if method else bytes(member)


def _members_of_sdist(data: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            if stream := archive.extractfile(member) if member.isfile() else None:
                yield member.name, stream.read()
