"""Tables for functions of CuTe DSL are completed, and their compiled host code is translated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kernel_aot import cute_host, read_ops, variants
from kernel_aot.cute_reader import CuteOp, job
from kernel_aot.llvm_types import parse_type
from kernel_builder import toml_file
from kernel_builder.config import aot_toml
from kernel_format.errors import ConfigError
from tests.support.files import replace
from tests.support.places import ROOT

EXAMPLE = ROOT / "examples/cute-dsl/row_norm"
MISTAKES = toml_file.read(Path(__file__).with_name("mistakes.toml"))


def test_sizes_of_tensors_become_conditions_and_compiled_values() -> None:
    _, op = read_ops(EXAMPLE, aot_toml.read(EXAMPLE))
    assert isinstance(op, CuteOp)
    assert op.dynamic_sizes("x") == [0]  # of rows and N, which the rows of `config` set
    assert "weight.size(0) == x.size(1)" in [condition.python for condition in op.requires]
    assert [config.when.python for config in op.configs if config.when] == ["x.size(1) == 1024", "x.size(1) == 4096"]
    parameters = job(list(variants(op))[1])["parameters"]
    assert parameters["x"] == {"kind": "tensor", "value": ["rows", 4096], "dtype": "BFloat16", "align": 1}
    assert parameters["THREADS"] == {"kind": "constant", "value": 256}
    assert list(op.inputs) == ["x", "weight", "out", "rstd", "eps", "stream"]


@pytest.mark.parametrize("mistake", MISTAKES["cute-dsl"], ids=lambda mistake: mistake["message"])
def test_a_table_that_does_not_fit_is_an_error(tmp_path: Path, mistake: Mapping[str, str]) -> None:
    project = shutil.copytree(EXAMPLE, tmp_path / "p", ignore=shutil.ignore_patterns("build"))
    replace(project / "aot.toml", mistake["old"], mistake["new"])
    with pytest.raises(ConfigError) as caught:
        read_ops(project, aot_toml.read(project))
    assert mistake["message"] in f"{caught.value} {caught.value.hint}"
    assert mistake["where"] in str(caught.value.where)


@pytest.mark.parametrize(
    ("text", "size", "scalars"),
    [
        ("!llvm.ptr<1>", 8, [(0, "char*")]),
        ("!llvm.struct<(ptr<1>, struct<(i32, struct<()>)>)>", 16, [(0, "char*"), (8, "uint32_t")]),
        (
            "!llvm.struct<(ptr<1>, struct<(struct<(i32, i32)>, struct<(i64)>)>)>",
            24,
            [(0, "char*"), (8, "uint32_t"), (12, "uint32_t"), (16, "uint64_t")],
        ),
        ("!llvm.struct<(i1, f32)>", 8, [(0, "bool"), (4, "float")]),
        ("!llvm.array<17 x struct<(i32, array<4 x i8>, array<64 x i8>)>>", 17 * 72, None),
    ],
)
def test_types_have_the_layout_of_llvm(text: str, size: int, scalars: list[tuple[int, str]] | None) -> None:
    kind = parse_type(text)
    assert kind.size == size
    assert scalars is None or list(kind.scalars()) == scalars


def launch(stream: str, shared: str) -> list[dict[str, Any]]:
    """Return a function with the arguments (tensor, stream), which launches one kernel."""
    text = Path(__file__).with_name("cute_host.json").read_text()
    blocks: list[dict[str, Any]] = json.loads(text.replace("$STREAM", stream).replace("$SHARED", shared))
    return blocks


def test_host_code_is_translated() -> None:
    host = cute_host.translate(launch("arg1", "49152"), ["other", "k"], "kernels.py")
    assert host.shared == 49152
    for line in MISTAKES["host"]:
        assert f"  {line}\n" in host.text


MALLOC = {
    "name": "call",
    "results": [("0", "i32")],
    "operands": [],
    "successors": [],
    "attributes": {"callee": "@malloc"},
}


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (launch("0", "0"), "a launch without the stream"),
        ([{"arguments": [], "operations": [MALLOC]}], "call @malloc"),
        ([{"arguments": [("arg0", "vector<4xi32>")], "operations": []}], "the type vector<4xi32>"),
    ],
)
def test_other_host_code_is_an_error(blocks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        cute_host.translate(blocks, ["k"], "kernels.py")
    assert caught.value.hint
