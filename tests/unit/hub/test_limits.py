"""Packages and symbols that take long to read, or much memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder import checks
from kernel_builder.demangle import demangle
from kernel_builder.hub import limits
from kernel_builder.hub.audit import audit
from kernel_format.errors import CheckError

pytestmark = [pytest.mark.attack, pytest.mark.timeout(60)]


def test_a_package_that_takes_too_long_to_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_SECONDS", 2)
    package = tmp_path / "torch-cpu"
    package.mkdir()
    bases = "".join(f"class C{n}(C{n + 1}, C{n + 2}): pass\n" for n in range(60))
    (package / "__init__.py").write_text(f"{bases}__all__ = ['C0']\n")
    with pytest.raises(CheckError, match="takes more than 2 s of CPU time or 4 GB of memory"):
        audit(str(tmp_path))


def test_the_time_of_checks_is_linear(tmp_path: Path) -> None:
    chain = "import os\nif x: pass\n" + "elif x: pass\n" * 300 + "\n" * 1_000_000 + "else: pass\n"
    (tmp_path / "__init__.py").write_text(chain)
    assert checks.run(tmp_path, only=["python-imports"]).passed


def test_a_symbol_whose_declaration_grows_exponentially_stays_mangled() -> None:
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    bomb = "_Z1f1AI1BS0_E" + "".join(f"S_IS{digit}_S{digit}_E" for digit in digits[1:23])
    assert demangle([bomb, "_Z1gv"]) == {bomb: bomb, "_Z1gv": "_Z1gv"}
