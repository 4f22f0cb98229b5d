"""Tests of the keys that are read from launch functions."""

import json
import re
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest

from kernel_aot import read_launch_function, read_ops
from kernel_builder import toml_file
from kernel_format.errors import ConfigError
from tests.support.places import SOURCES

MISTAKES = toml_file.read(Path(__file__).with_name("mistakes.toml"))
KERNEL = SOURCES["launched_kernel"]


def read(tmp_path: Path, source: str) -> dict:
    path = tmp_path / "kernels.py"
    path.write_text(KERNEL + textwrap.dedent(source))
    return read_launch_function(path, "launch", {})


def test_a_launch_function_is_read(tmp_path):
    keys = read(tmp_path, SOURCES["launch_function"])
    assert keys == json.loads(Path(__file__).with_name("launch_keys.json").read_text())


@pytest.mark.parametrize("mistake", MISTAKES["launch"], ids=lambda mistake: mistake["message"])
def test_other_constructs_are_named_with_their_line(tmp_path, mistake):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "def launch(x: torch.Tensor):\n" + textwrap.indent(mistake["body"], "    "))
    assert error.value.message.startswith(f"launch {mistake['message']}")
    assert error.value.where == f"{tmp_path}/kernels.py:{KERNEL.count(chr(10)) + mistake['line']}"
    assert re.search("schema, outputs, arguments, grid in .op.launch.|tl.make_tensor_descriptor", error.value.hint)


@pytest.mark.parametrize(("function", "message"), MISTAKES["parameters"])
def test_the_function_has_parameters_of_schemas(tmp_path, function, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(tmp_path, f"def {function}:\n    pass")


@pytest.mark.parametrize(("body", "schema"), MISTAKES["stores"])
def test_no_store_is_overlooked(tmp_path, body, schema):
    """Torch may remove calls of an op that mutates nothing, and a function of another module may store."""
    source = (
        f"@triton.jit\ndef k(x, y, n, z, N: tl.constexpr):\n    {body}\n"
        "def launch(x: torch.Tensor, y: torch.Tensor, n: int):\n    k[(1,)](x, y, n, None, 4)\n"
    )
    with nullcontext() if "->" in schema else pytest.raises(ConfigError, match=schema):
        assert read(tmp_path, source)["schema"] == schema
    assert read_launch_function(tmp_path / "kernels.py", "launch", {"schema": schema})["arguments"]


P = ", ".join(f"p{number}" for number in range(12))
WIDE = "".join(f"def f{n}({P}):\n    f{n + 1}({P})\n    f{n + 1}({P.replace('p0', f'p0 + p{n}')})\n" for n in range(12))
CALLS = "\n@triton.jit\ndef f{0}(x_ptr):\n    f{1}(x_ptr)\n    f{1}(x_ptr)\n"


@pytest.mark.attack
@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("".join(CALLS.format(number, number + 1) for number in range(40)) + "def f40(x_ptr): pass", None),
        (CALLS.format(0, 1) + CALLS.format(1, 0), None),
        ("".join(CALLS.format(number, number + 1) for number in range(2000)), "is too complex"),
        (f"{WIDE}def f12({P}): tl.store(p0, 1)", "stores through more than 1000 pointers"),
        (f"N = {'1+' * 20_000}1", "is not Python" if sys.version_info >= (3, 11) else None),
        (f"def op(x: torch.Tensor, n: int = 0x{'f' * 6000}) -> None:\n    f0[(1,)](x)\n", "is too complex"),
    ],
)
def test_no_module_stops_its_reader(tmp_path: Path, kernels: str, message: str | None) -> None:
    op = "@triton.jit\ndef f0(x_ptr):\n    pass\ndef op(x: torch.Tensor) -> None:\n    f0[(1,)](x)\n"
    (tmp_path / "kernels.py").write_text(op + kernels)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        read_ops(tmp_path, {"source": "kernels.py", "op": {"op": {"kernel": "f0", "dtypes": ["float32"]}}})
