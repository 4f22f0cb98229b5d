"""The API of a package, read from its files and inspected in the loaded module."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.hub import package_api

MODULE = """
from typing import Optional

import torch as _torch

from . import layers
from .ops import gelu, relu as relu_

__all__ = ["gelu", "layers", "relu_", "EPSILON"]
EPSILON = 1e-6
"""
OPS = '''
"""Operators."""

import torch


def gelu(x: torch.Tensor, /, factor: float = 0.5, *more: int, approximate: str = "none", **rest) -> torch.Tensor:
    """Returns gelu.

    More.
    """


def relu(x, out=None):
    """Returns relu."""
'''
LAYERS = '''
"""Layers."""

from torch import nn


class GELU(nn.Module):
    """A layer."""

    has_backward = True

    def forward(self, x):
        """Applies it."""

    def _hidden(self):
        pass


def _also_hidden():
    pass
'''


def package(root: Path, ops: str = OPS, module: str = MODULE) -> Path:
    root.mkdir(parents=True)
    for name, text in (("__init__", module), ("ops", ops), ("layers", LAYERS)):
        (root / f"{name}.py").write_text(text)
    return root


def test_names_and_their_parameters(tmp_path: Path) -> None:
    read = package_api.read(package(tmp_path / "torch-cuda"))
    calls = {name: (member.kind, member.call) for name, member in read.members.items()}
    assert calls == {
        "EPSILON": ("attribute", ""),
        "gelu": ("function", "(x, /, factor=0.5, *more, approximate='none', **rest)"),
        "layers": ("module", ""),
        "layers.GELU": ("class", ""),
        "layers.GELU.forward": ("function", "(self, x)"),
        "layers.GELU.has_backward": ("attribute", ""),
        "relu_": ("function", "(x, out=None)"),
    }
    assert read.members["gelu"].summary == "Returns gelu."


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("out=None", "out=None, inplace=False", ["relu_(x, out=None) becomes relu_(x, out=None, inplace=False)"]),
        ('"none"', "'none'", []),
        ("factor: float = 0.5", "factor: 'float' = 0.50", []),
        ("(x, out=None)", "(y, out=None)", ["relu_(x, out=None) becomes relu_(y, out=None)"]),
        (
            "*more: int, ",
            "*, ",
            [
                "gelu(x, /, factor=0.5, *more, approximate='none', **rest) becomes "
                "gelu(x, /, factor=0.5, *, approximate='none', **rest)"
            ],
        ),
    ],
)
def test_differences_are_those_that_callers_notice(
    tmp_path: Path, before: str, after: str, expected: list[str]
) -> None:
    older = package_api.read(package(tmp_path / "older"))
    newer = package_api.read(package(tmp_path / "newer", OPS.replace(before, after)))
    assert list(older.differences(newer)) == expected
    assert not older.differences(older)


def test_removed_and_new_names(tmp_path: Path) -> None:
    older = package_api.read(package(tmp_path / "older"))
    newer = package_api.read(package(tmp_path / "newer", module=MODULE.replace('"EPSILON"', '"EPS"')))
    assert set(older.differences(newer)) == {"attribute EPS is new", "attribute EPSILON is gone"}


@pytest.mark.parametrize(
    "exported",
    [
        '__all__ = ["gelu"]\n__all__.append("relu")',
        '__all__ = ["gelu"]\nif torch.cuda.is_available():\n    __all__.extend(["relu"])',
        '__all__ = sorted(["relu", "gelu"])',
        '__all__ = list({"gelu": gelu, "relu": relu})',
        '__all__ = [name for name in dir() if name[0] != "_" and name != "torch"]',
        "",  # Python's users call what a module imports, too
    ],
)
def test_names_whose_list_is_computed(tmp_path: Path, exported: str) -> None:
    """A name that is not found could change without a word to those who publish it."""
    module = f"import torch\n\nfrom .ops import gelu, relu\n\n{exported}\n"
    read = package_api.read(package(tmp_path / "torch-cuda", module=module))
    assert {name: member.kind for name, member in read.members.items()} == {"gelu": "function", "relu": "function"}
    assert read.members["relu"].call == "(x, out=None)"


def test_packages_of_older_builders_have_an_inner_directory(tmp_path: Path) -> None:
    flat = package_api.read(package(tmp_path / "flat" / "torch-cuda"))
    nested = tmp_path / "nested" / "torch-cuda"
    package(nested / "my_kernel")
    assert package_api.read(nested) == flat


IN_PYTHON = """
import torch
from ._ops import add_op_namespace_prefix, ops_namespace

library = torch.library.Library(ops_namespace, "FRAGMENT")
library.define("scaled(Tensor x, float factor=2.) -> Tensor")
torch.library.define(f"{ops_namespace}::shifted", "(Tensor x, int by) -> Tensor")


@torch.library.custom_op(add_op_namespace_prefix("added"), mutates_args=())
def _added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


@torch.library.custom_op("any::cleared", mutates_args=("x",))
def _cleared(x: torch.Tensor) -> None:
    x.zero_()


@torch.library.custom_op("any::schemed", mutates_args=(), schema="(Tensor x) -> Tensor")
def _schemed(x):
    return x.clone()
"""


def test_operators_defined_in_python(tmp_path: Path) -> None:
    older = package_api.read(package(tmp_path / "older", ops=OPS + IN_PYTHON))
    assert older.ops == {
        "scaled": "scaled(Tensor x, float factor=2.) -> Tensor",
        "shifted": "shifted(Tensor x, int by) -> Tensor",
        "added": "added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor",
        "cleared": "cleared(x: torch.Tensor) -> None, writes to ('x',)",
        "schemed": "schemed(Tensor x) -> Tensor",
    }
    changed = IN_PYTHON.replace("y: torch.Tensor", "y: float").replace("int by", "int by, int of=0")
    assert older.differences(package_api.read(package(tmp_path / "newer", ops=OPS + changed))) == (
        "operator added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor becomes "
        "added(x: torch.Tensor, y: float) -> torch.Tensor",
        "operator shifted(Tensor x, int by) -> Tensor becomes shifted(Tensor x, int by, int of=0) -> Tensor",
    )


def test_the_files_and_the_loaded_module_have_the_same_api(scale: Path) -> None:
    (built,) = (scale / "build").iterdir()
    read, loaded = package_api.read(built), package_api.loaded(built)
    assert loaded is not None
    assert read.ops == loaded.ops == {"scaled": "scaled(Tensor input, float factor) -> Tensor"}
    assert list(read.members) == list(loaded.members) == ["scaled"]
    assert read.members["scaled"].signature == loaded.members["scaled"].signature
    assert read.members["scaled"].summary == loaded.members["scaled"].summary
