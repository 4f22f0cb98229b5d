"""Byte ranges of wheels: read without the zip directory, and checked against RECORD."""

from __future__ import annotations

import hashlib
import io
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_builder.toolchain.wheels import CorruptDownload, checked, members, parse_record

from .index_server import wheel

FILES = {"pkg/a.h": b"// a\n" * 50, "pkg/sub/b.h": b"", "other/c.h": b"// c\n"}
DATA = wheel("pkg", "1.0", FILES)
with zipfile.ZipFile(io.BytesIO(DATA)) as _archive:
    SLICE = DATA[: _archive.start_dir]
    RECORD = hashlib.sha256(_archive.read("pkg-1.0.dist-info/RECORD")).hexdigest()


def read(data: bytes, record: str = RECORD, prefix: str = "pkg/") -> dict[str, bytes]:
    return dict(checked([memoryview(data)], record, prefix, lambda name: True))


def test_the_standard_library_reads_the_same_files() -> None:
    assert read(SLICE) == {"a.h": FILES["pkg/a.h"], "sub/b.h": b""}
    with zipfile.ZipFile(io.BytesIO(DATA)) as archive:
        assert {m.name: m.content() for m in members(memoryview(SLICE))} == {
            name: archive.read(name) for name in archive.namelist()
        }


@given(position=st.integers(0, len(SLICE) - 1), value=st.integers(1, 255), length=st.integers(1, len(SLICE)))
def test_an_altered_or_shortened_range_is_rejected_or_harmless(position: int, value: int, length: int) -> None:
    altered = bytearray(SLICE)
    altered[position] ^= value
    for data in (bytes(altered), SLICE[:length]):
        try:
            got = read(data)
        except CorruptDownload:
            continue
        # Times and other files may differ, but every yielded file is the original.
        assert all(FILES[f"pkg/{name}"] == content for name, content in got.items())


def test_a_record_of_another_wheel_is_rejected() -> None:
    with pytest.raises(CorruptDownload, match=f"expected {'0' * 64}"):
        read(SLICE, record="0" * 64)


@pytest.mark.parametrize("name", ["pkg/../../etc/passwd", "pkg//etc/passwd"])
def test_a_file_outside_of_the_prefix_is_rejected(name: str) -> None:
    evil = wheel("pkg", "1.0", {name: b"x"})
    with zipfile.ZipFile(io.BytesIO(evil)) as archive:
        record = hashlib.sha256(archive.read("pkg-1.0.dist-info/RECORD")).hexdigest()
        data = evil[: archive.start_dir]
    with pytest.raises(CorruptDownload, match="leads out of pkg/"):
        read(data, record)


def test_record_with_quoted_names_and_files_without_hashes() -> None:
    text = '"a,b.h",sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\nx/RECORD,,\n'
    assert parse_record(text) == {"a,b.h": hashlib.sha256(b"").hexdigest()}
