"""The Python of the kernels reads no private name of Torch, and the load check a single one, which Torch still has.

Private names begin with an underscore; dunders do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.places import ROOT

PROJECTS = sorted(path.parent for path in ROOT.glob("kernels/*/torch-ext/torch_binding.cpp"))


def private_names(source: str) -> Iterator[str]:
    """Yield the private names that a source imports by absolute names, or reads of other objects than its own."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("self", "cls"):
            names = [node.attr]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        yield from (name for name in names if name.startswith("_") and not name.endswith("__"))


@pytest.mark.parametrize("line", ["import torch._C", "from torch import _C", "op._op", "torch.ones(1)._version"])
def test_private_names_are_found(line: str) -> None:
    assert list(private_names(line)) and not list(private_names("from ._ops import ops\nself._x\nx.__class__\n"))


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.parent.name)
def test_a_kernel_reads_no_private_name(project: Path) -> None:
    sources = list(project.glob("*/*.py"))
    assert sources and [(path.name, *private_names(path.read_text())) for path in sources] == [
        (path.name,) for path in sources
    ]


def test_the_load_check_reads_one_private_name_which_lists_all_ops() -> None:
    source = (ROOT / "kernel_builder/checks/probe/__main__.py").read_text()
    assert {*private_names(source)} - {"_exit"} == {"_C", "_jit_get_all_schemas"}  # `os._exit` is documented
    schemas = {(schema.name, schema.overload_name): schema for schema in torch._C._jit_get_all_schemas()}
    assert [str(value.type) for value in schemas["aten::add", "Tensor"].returns] == ["Tensor"]
