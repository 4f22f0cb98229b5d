"""Reads a source distribution, whose SHA-256 the lock pins."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator

from kernel_builder.toolchain.wheels import CorruptDownload
from kernel_format.untrusted_paths import UnsafePath, checked_path


def checked(data: memoryview, sha256: str, prefix: str, keep: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a source distribution that are wanted, after checking its hash.

    Args:
        data: The whole file.
        sha256: The SHA-256 that the lock pins.
        prefix: A directory in the file, with a slash at its end. Files outside of it are left out.
        keep: Whether a file, named relative to `prefix`, is wanted.

    Yields:
        The name relative to `prefix`, and the content.
    """
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise CorruptDownload(f"has SHA-256 {got}, expected {sha256}")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            name = member.name.removeprefix(prefix)
            if not member.isfile() or not member.name.startswith(prefix) or not keep(name):
                continue
            try:
                checked_path(name)
            except UnsafePath as error:
                raise CorruptDownload(f"leads out of {prefix}: {error}") from error
            stream = archive.extractfile(member)
            assert stream is not None
            yield name, stream.read()
