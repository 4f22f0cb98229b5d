"""The API of a package, read from its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.hub import package_api
from tests.support.files import write_files
from tests.support.places import SOURCES

GELU = "gelu(x, /, factor=0.5, *more, approximate='none', **rest)"


def package(root: Path, before: str = "", after: str = "", module: str = SOURCES["public_names"]) -> Path:
    files = {"__init__.py": module, "ops.py": SOURCES["public_operators"], "layers.py": SOURCES["public_layers"]}
    return write_files(root, {name: text.replace(before, after) if before else text for name, text in files.items()})


def test_signatures_have_the_public_name(tmp_path: Path) -> None:
    members = package_api.read(package(tmp_path / "a")).members
    assert members["relu_"].signature == "relu_(x, out=None)"
    assert members["layers.GELU.forward"].signature == "layers.GELU.forward(x)"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("out=None", "out=None, inplace=False", ["relu_(x, out=None) becomes relu_(x, out=None, inplace=False)"]),
        ('"EPSILON"', '"EPS"', ["attribute EPS is new", "attribute EPSILON is gone"]),
        ('"none"', "'none'", []),
        ("_hidden(self)", "_hidden(self, x)", []),
        ("forward(self, x)", "forward(self)", ["layers.GELU.forward(self, x) becomes layers.GELU.forward(self)"]),
        ("factor: float = 0.5", "factor: 'float' = 0.50", []),
        ("(x, out=None)", "(y, out=None)", ["relu_(x, out=None) becomes relu_(y, out=None)"]),
        ("*more: int, ", "*, ", [f"{GELU} becomes {GELU.replace('*more', '*')}"]),
    ],
)
def test_differences_are_those_that_callers_notice(
    tmp_path: Path, before: str, after: str, expected: list[str]
) -> None:
    older = package_api.read(package(tmp_path / "older"))
    assert sorted(older.differences(package_api.read(package(tmp_path / "newer", before, after)))) == expected
    assert not older.differences(older)


@pytest.mark.parametrize(
    "exported", ['__all__ = ["gelu"]\n__all__ += ["relu"]', '__all__ = sorted(["relu", "gelu"])', ""]
)
def test_names_of_a_computed_list_are_found(tmp_path: Path, exported: str) -> None:
    module = f"import torch\n\nfrom .ops import gelu, relu\n\n{exported}\n"
    read = package_api.read(package(tmp_path / "torch-cuda", module=module))
    assert {name: member.kind for name, member in read.members.items()} == {"gelu": "function", "relu": "function"}
    assert read.members["relu"].call == "(x, out=None)"
