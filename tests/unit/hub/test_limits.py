"""Packages, pages of indexes and symbols that take long to read, or much memory."""

from __future__ import annotations

import signal
import struct
from functools import partial
from pathlib import Path

import pytest

from kernel_builder import backends, checks, elf, inline_project, limits
from kernel_builder.demangle import demangle
from kernel_builder.hub.audit import audit
from kernel_builder.hub.retries import RateLimited
from kernel_builder.toolchain import index
from kernel_format.errors import CheckError, FetchError
from tests.support.files import elf_file, write_files
from tests.support.loopback import QuietHandler, served

pytestmark = [pytest.mark.attack, pytest.mark.timeout(60)]


def test_a_package_that_takes_too_long_to_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_SECONDS", 2)
    bases = "".join(f"class C{n}(C{n + 1}, C{n + 2}): pass\n" for n in range(60))
    write_files(tmp_path, {"torch-cpu/__init__.py": f"{bases}__all__ = ['C0']\n"})
    with pytest.raises(CheckError, match="takes more than 2 s of CPU time or 4 GB of memory"):
        audit(str(tmp_path))


class Unusual(Exception):
    def __init__(self, first: str, _second: str) -> None:
        super().__init__(first)


def test_the_end_of_a_reading_process_is_named() -> None:
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(CheckError, match="name: the process that reads it ended with User defined signal 1"):
        limits.within_limits(partial(signal.raise_signal, signal.SIGUSR1), "name")
    with pytest.raises(RuntimeError, match="Unusual: a"):
        limits.within_limits(partial(fail, Unusual("a", "b")), "name")
    with pytest.raises(RateLimited, match="hub: refused") as limited:
        limits.within_limits(partial(fail, RateLimited("refused", "hub", {"Retry-After": "900"})), "name")
    assert limited.value.wait == 900 and "wait 900 seconds" in str(limited.value.hint)


@pytest.mark.parametrize(
    ("section", "content", "message"),
    [
        (".nv_fatbin", struct.pack("<IHHQ", 0xBA55ED50, 1, 0, 0), "the container at byte 256 has a header of 0 bytes"),
        (".hip_fatbin", b"__CLANG_OFFLOAD_BUNDLE__" + b"\xff" * 8, "damaged"),
    ],
)
def test_device_code_without_an_end_is_refused(tmp_path: Path, section: str, content: bytes, message: str) -> None:
    (tmp_path / "a.so").write_bytes(elf_file(section, content))
    with pytest.raises(elf.Unreadable, match=message):
        for backend in backends.every():
            backend.device_code(tmp_path / "a.so", backends.reading(tmp_path / "a.so"))


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("text/html", b"<b>" * 1_000_000, "takes more than 2 s of CPU time or 4 GB of memory"),
        ("text/html", b"<a href='torch-2.0-py3-none-any.whl'>torch-2.0-py3-none-any.whl</a>" * 3, "more than 2 files"),
        ("text/html", b"<base href='/%s/'><a href='torch-2.0.tar.gz'>torch-2.0.tar.gz</a>" % (b"x" * 3000), "long add"),
        ("application/vnd.pypi.simple.v1+json", b"[" * 100_000, "is not a package index: RecursionError"),
        ("application/vnd.pypi.simple.v1+json", b'{"files": 0}', "is not a package index: ValidationError"),
    ],
)
def test_a_hostile_page_of_an_index_is_refused(
    kind: str, body: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_SECONDS", 2)
    monkeypatch.setattr(index, "_MOST_FILES", 2, raising=False)
    monkeypatch.setattr(index, "_ADDRESS_BYTES", 2000, raising=False)

    class Page(QuietHandler):
        def do_GET(self) -> None:
            self.send(200, body, Content_Type=kind)

    with served(Page) as url, pytest.raises(FetchError, match=message):
        index.Index(url).packages("torch")


def test_the_time_of_checks_is_linear(tmp_path: Path) -> None:
    chain = "import os\nif x: pass\n" + "elif x: pass\n" * 300 + "\n" * 1_000_000 + "else: pass\n"
    (tmp_path / "__init__.py").write_text(chain)
    assert next(checks.run_all([tmp_path], only=["python-imports"])).passed


def test_the_signature_of_a_function_is_found_in_linear_time() -> None:
    source = f"// {'a' * 1_000_000}\n#include <torch/all.h>\nvoid scale(torch::Tensor& x) {{}}\n"
    assert inline_project.files("o/scale", source, ["scale"], stem="a", for_authors=True)


def test_a_symbol_whose_declaration_grows_exponentially_stays_mangled() -> None:
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    bomb = "_Z1f1AI1BS0_E" + "".join(f"S_IS{digit}_S{digit}_E" for digit in digits[1:23])
    assert demangle([bomb, "_Z1gv"]) == {bomb: bomb, "_Z1gv": "_Z1gv"}
