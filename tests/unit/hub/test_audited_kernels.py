"""The kernels of a binary, by the names that its host code registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder import elf
from kernel_builder.hub.audit import _kernels

NAMES = (
    b"_ZN5scale11scaled_rowsIfEEvPT_l",
    b"_ZN12_GLOBAL__N_111copied_rowsEPfl",
    b"_ZN4cuda3std3__412_GLOBAL__N_16ignoreE",
    b"_ZN4cuda3std3__419piecewise_constructE",
)


def test_kernels_are_functions_and_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elf, "constants", lambda path: [b"\0" + b"\0".join(NAMES) + b"\0"])
    assert [name for name, _ in _kernels(Path("a.so"), ())] == [
        "(anonymous namespace)::copied_rows(float*, long)",
        "void scale::scaled_rows<float>(float*, long)",
    ]
