"""The installed Torch: no code reads its private names but one, and its headers agree with the stable ABI's data."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernel_builder.checks.symbols import SHIMS_OF_BACKEND, SHIMS_SINCE
from kernel_builder.config.variant import Release
from kernel_builder.upkeep import exported
from tests.support.places import ROOT
from tests.support.sample_package import TORCH

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


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.parent.name)
def test_a_kernel_reads_no_private_name(project: Path) -> None:
    sources = list(project.glob("*/*.py"))
    assert sources and [(path.name, *private_names(path.read_text())) for path in sources] == [
        (path.name,) for path in sources
    ]


def test_blocks_lists_its_private_names_of_libraries() -> None:
    names: set[str] = set()
    for path in ROOT.glob("kernels/blocks/torch-ext/blocks/*.py"):
        source = path.read_text()
        nodes = [*ast.walk(ast.parse(source))]
        joined = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant) and node not in joined}
        names.update(private_names(source), (text for text in texts if re.fullmatch("_[a-z_]+[a-z]", text)))
    listed = json.loads((ROOT / "kernels/blocks/tests/private_names.json").read_text())
    assert names == {name for library in listed.values() for name in library}


def test_the_load_check_reads_one_private_name_which_lists_all_ops() -> None:
    source = (ROOT / "kernel_builder/checks/probe/__main__.py").read_text()
    assert {*private_names(source)} - {"_exit"} == {"_C", "_jit_get_all_schemas"}  # `os._exit` is documented
    schemas = {(schema.name, schema.overload_name): schema for schema in torch._C._jit_get_all_schemas()}
    assert [str(value.type) for value in schemas["aten::add", "Tensor"].returns] == ["Tensor"]


INSTALLED = Release.parse(torch.__version__.partition("+")[0])
# The headers of 2.10 and later declare these without a guard. The headers of 2.9 do not have them.
UNGUARDED = {
    "aoti_torch_cuda_caching_allocator_raw_alloc",
    "aoti_torch_cuda_caching_allocator_raw_delete",
    "aoti_torch_delete_c10_value_object",
    "aoti_torch_int64_to_ivalue",
    "aoti_torch_str_to_ivalue",
    "aoti_torch_strlist_to_ivalue",
    "aoti_torch_tensor_to_ivalue",
}


@pytest.mark.parametrize("release", sorted({r for r in SHIMS_SINCE.values() if r <= INSTALLED}), ids=str)
def test_the_functions_of_each_release(release: Release) -> None:
    declared = exported(TORCH / "include", release, cuda=True)
    assert {name for name, since in SHIMS_SINCE.items() if since <= release} == (
        declared - UNGUARDED if release == Release(2, 9) else declared
    )


def test_the_functions_of_cuda() -> None:
    known = {name for name in SHIMS_OF_BACKEND["cuda"] if SHIMS_SINCE[name] <= INSTALLED}
    include = TORCH / "include"
    assert known == exported(include, INSTALLED, cuda=True) - exported(include, INSTALLED, cuda=False)
