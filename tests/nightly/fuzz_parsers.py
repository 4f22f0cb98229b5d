"""Fuzzes one parser of files that other users publish: `fuzz_parsers.py TARGET DIRECTORY SECONDS`.

The directory holds first inputs and gets new ones. A traceback, or an input that takes 5 s, ends the process with an
error, and a file has the input.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import atheris
import requests

with atheris.instrument_imports(include=["kernel_builder", "kernel_format", "kernel_hub", "elftools", "yaml"]):
    from kernel_builder import backends, elf
    from kernel_builder.toolchain import archives, resolve
    from kernel_builder.toolchain.components import ComponentFile
    from kernel_builder.toolchain.index import Index
    from kernel_builder.toolchain.lock import PinnedFile
    from kernel_format import front_matter, metadata, signatures, untrusted_paths, variant
    from kernel_format.errors import KernelBuilderError
    from kernel_hub.repositories.reader import _summary
    from kernel_hub.routes.pages import _clean_html

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pypi_simple import DistributionPackage

FILE = Path(tempfile.mkdtemp(), "input.so")
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


def fuzz_elf(data: bytes) -> None:
    """Read an ELF file as checks and `audit` do."""
    FILE.write_bytes(data)
    code = [partial(each.device_code, read_at=backends.reading(FILE)) for each in backends.every()]
    for read in (elf.read, elf.defined_symbols, elf.constants, elf.sections, *code):
        try:
            read(FILE)
        except (elf.Unreadable, KernelBuilderError):
            continue


def fuzz_metadata(data: bytes) -> None:
    """Read a package's `metadata.json`, and the names in it."""
    try:
        about = metadata.PackageMetadata.from_json(data)
    except ValueError:
        return
    assert isinstance(about.is_dirty, bool) and isinstance(about.archs, tuple)


def fuzz_card(data: bytes) -> None:
    """Read a card, and render it on the Hub's page."""
    text = data.decode("utf-8", "replace")
    front, body = front_matter.split(text)
    with suppress(ValueError):
        front_matter.parse(front or "")
    assert "<script" not in _clean_html(body, "/kernels/a/b/resolve/main/").lower()
    assert isinstance(_summary(body), str)


def fuzz_signature(data: bytes) -> None:
    """Read a signature. A changed one is not valid."""
    FILE.write_bytes(data)
    bundle = signatures.read_bundle(FILE)
    assert not (signatures.refers_to_key(bundle) and signatures.is_signed_by(bundle, b"other", [KEY.public_key()]))


def fuzz_names(data: bytes) -> None:
    """Read the names of variants, and of files in packages and wheels."""
    text = data.decode("utf-8", "surrogateescape")
    for read in (variant.parse, untrusted_paths.checked_path, untrusted_paths.checked_text):
        try:
            read(text)
        except (KernelBuilderError, untrusted_paths.UnsafePath):
            continue


class Ranges:
    """The session of an index with one wheel, in a file: it answers with byte ranges."""

    def get(self, url: str, *, headers: dict[str, str], **_: object) -> requests.Response:
        """Return a range of the file."""
        data, response = FILE.read_bytes(), requests.Response()
        first, _, last = headers["Range"].removeprefix("bytes=").partition("-")
        start = int(first) if first else max(len(data) - int(last or 0), 0)
        part = data[start : int(last) + 1 if first and last.isdigit() else len(data)]
        response.status_code = 206 if part else 416
        response.raw = io.BytesIO(part)
        response.headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        return response


WHEEL = DistributionPackage("a-1.0-py3-none-any.whl", "", "a", "1.0", "wheel", {"sha256": ""}, None, None)
INDEX = Index("http://localhost/")
INDEX._session, INDEX._known = Ranges(), {"a": [WHEEL]}  # type: ignore[assignment]


def fuzz_wheel(data: bytes) -> None:
    """Read a wheel of an index as `toolchain update` does, and its members as each build does."""
    FILE.write_bytes(data)
    with suppress(KernelBuilderError):
        resolve._requirements.__wrapped__(INDEX, "a 1.0")
    with suppress(KernelBuilderError):
        resolve._parts_of_wheel(INDEX, WHEEL, ComponentFile(project="a", prefix="", take=("",)))
    digest = hashlib.sha256(data).hexdigest()
    pin = PinnedFile("a", "1.0", "a.whl", digest, digest, ((0, len(data)),), digest, "", ("",))
    with suppress(KernelBuilderError, OSError), tempfile.TemporaryDirectory() as directory:
        archives.unpack(pin, FILE, Path(directory))


def small_wheel() -> bytes:
    """Return a wheel with a header, as the first input."""
    buffer = io.BytesIO()
    with ZipFile(buffer, "w", ZIP_DEFLATED) as archive:
        metadata = "Metadata-Version: 2.1\nName: a\nVersion: 1.0\nRequires-Dist: b==2.*; extra == 'all'\n"
        for name, text in (("a/b.h", "//" * 50), ("a.dist-info/METADATA", metadata), ("a.dist-info/RECORD", "")):
            archive.writestr(name, text)
    return buffer.getvalue()


FIRST: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "elf": (fuzz_elf, []),
    "metadata": (fuzz_metadata, [b'{"id": "x", "backend": {"type": "cuda", "archs": ["9.0"]}, "digest": {}}']),
    "card": (fuzz_card, [b"---\nlicense: mit\n---\n# a\n\n| a | b |\n| - | - |\n| ![x](y.svg) | <b>c</b> |\n"]),
    "signature": (fuzz_signature, [signatures.key_bundle(b"content", KEY).encode(), json.dumps({}).encode()]),
    "wheel": (fuzz_wheel, [small_wheel()]),
    "names": (fuzz_names, [b"torch-stable-abi210-cu130-x86_64-linux", b"tvm-ffi01-cpu-x86_64-linux", b"a/b.py"]),
}


def main() -> None:
    """Fuzz until the time is over."""
    target, directory, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    fuzz, first = FIRST[target]
    for number, data in enumerate(first):
        (directory / str(number)).write_bytes(data)
    options = [f"-max_total_time={seconds}", "-timeout=5", "-max_len=65536", "-rss_limit_mb=2000"]
    atheris.Setup([sys.argv[0], str(directory), *options, f"-artifact_prefix={directory}/failed-"], fuzz)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
