"""Files and metadata -> a wheel with reproducible bytes.

auditwheel writes the record and the archive, as it does for the wheels that it repairs.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from auditwheel.tools import dir2zip
from auditwheel.wheeltools import rewrite_record
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name

from kernel_format import files

# The oldest time that a zip archive can hold; equal files give equal bytes.
_TIME = datetime(1980, 1, 1, tzinfo=timezone.utc)


def write(directory: Path, metadata: Metadata, platform: str, content: Mapping[str, bytes]) -> Path:
    """Write a wheel of these files into a directory, and return its path."""
    stem, tag = f"{canonicalize_name(metadata.name).replace('-', '_')}-{metadata.version}", f"py3-none-{platform}"
    purelib = "true" if platform == "any" else "false"
    info = {
        "METADATA": _headers(metadata),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: kernel-builder\nRoot-Is-Purelib: {purelib}\nTag: {tag}\n".encode(),
    }
    with files.temporary_directory() as temporary:
        tree = temporary / "tree"
        files.write_files(tree, {**content, **{f"{stem}.dist-info/{name}": data for name, data in info.items()}})
        rewrite_record(tree)
        # The archive records modes, which otherwise follow from the umask.
        for path in tree.rglob("*"):
            path.chmod(0o755 if path.is_dir() or path.suffix == ".so" else 0o644)
        archive = temporary / "archive"
        dir2zip(tree, archive, zlib.Z_BEST_COMPRESSION, _TIME)
        wheel = directory / f"{stem}-{tag}.whl"
        files.write_atomically(wheel, archive.read_bytes())
    return wheel


def _headers(metadata: Metadata) -> bytes:
    """Return the metadata with header names as the standard writes them: twine takes no others."""
    message = metadata.as_rfc822()
    headers = message.items()
    for name in message.keys():  # noqa: SIM118  # a message is not iterable
        del message[name]
    for name, value in headers:
        message[name.title()] = value
    return bytes(message)
