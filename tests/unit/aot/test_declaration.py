"""aot.toml is completed from the kernels, and a contradiction is an error that names both."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from kernel_aot import Op, expressions, python_code, read_ops, select_language, sources, variants
from kernel_aot.images import Cubin
from kernel_builder import toml_file
from kernel_builder.config import aot_toml
from kernel_builder.config.project import Project
from kernel_builder.config.project_files import read_project
from kernel_format.errors import ConfigError
from tests.support.files import write_files
from tests.support.places import ROOT, SOURCES

MISTAKES = toml_file.read(Path(__file__).with_name("mistakes.toml"))
EXAMPLES = toml_file.read(Path(__file__).with_name("examples.toml"))
BUILD = SOURCES["aot_build_toml"]
KERNELS = SOURCES["triton_kernels"]
AOT = SOURCES["aot_toml"]

SCOPE = {"x": "Tensor", "y": "Tensor", "n": "int", "m": "int", "flag": "bool", "scale": "float"}


def project(directory: Path, aot: str = AOT, kernels: str = KERNELS) -> Project:
    package = {"torch-ext/scale/__init__.py": "", "torch-ext/scale/kernels.py": kernels}
    return read_project(write_files(directory, {"build.toml": BUILD, "aot.toml": aot, **package}))


def ops_of(made: Project) -> tuple[Op, ...]:
    return read_ops(made.root, aot_toml.read(made.root))


def test_both_kinds_of_variants_are_offered_and_the_code_follows_the_table(tmp_path: Path) -> None:
    (op,) = ops_of(project(tmp_path))
    assert (op.schema, len(op.outputs)) == ("(Tensor x, float factor=2.0, bool flag=False) -> Tensor", 1)
    compiled = list(variants(op))
    assert len(compiled) == 12  # dtypes, configurations; all divisible, pointers, none
    assert compiled[0].signature == {"x_ptr": "*fp16", "out_ptr": "*fp16", "n": "i32", "factor": "fp32"}
    assert compiled[0].constants == {"BLOCK": 1024, "FLAG": False}
    assert [each.divisible for each in compiled[:3]] == [("x_ptr", "n"), ("x_ptr",), ()]
    assert op.configs[0].options == {"num_warps": 2, "num_stages": 3}
    rows = [
        [Cubin(90, False, b"cubin", "scale_kernel", 64, 0, 0), Cubin(100, False, b"new", "scale_kernel", 128, 0, 0)]
    ]
    code, cubins = select_language({}).sources(op, rows, "kernels.py", {}).values()
    assert "if (flag == false) {" in code and 'aot::check_contiguous(x, "x");' in code
    assert "scale_kernels[(dtype * 2 + config) * 3 + hints]" in code
    assert max(map(len, code.splitlines())) <= 120
    assert cubins.count("#if CUDART_VERSION >= 13000") == 2
    for image in ('{90, false, image_0, "scale_kernel", 64, 0, 0}', '{100, false, image_1, "scale_kernel", 128, 0, 0}'):
        assert image in cubins  # each is launched with its own number of threads
    assert "{true, images_0, " in cubins
    module = python_code.module([op], KERNELS, "kernels.py", 1)
    ast.parse(module)
    assert "import triton" not in module
    assert "def scale(x: torch.Tensor, factor: float=2.0, flag: bool=False) -> torch.Tensor:" in module


@pytest.mark.parametrize(("declared", "code"), MISTAKES["compiled"])
def test_compiled_values_are_those_of_the_launch_function(tmp_path: Path, declared: str, code: str) -> None:
    """A kernel with a smaller block, for example, would leave out the remainder of a row."""
    kernels = KERNELS.replace("BLOCK=1024", "BLOCK=triton.next_power_of_2(x.numel())")
    kernels = kernels if "FLAG" in declared else kernels.replace("FLAG=flag", "FLAG=False")
    (op,) = ops_of(project(tmp_path, re.sub("config = .*", declared, AOT), kernels))
    assert code in next(iter(select_language({}).sources(op, [], "kernels.py", {}).values()))


def test_a_declared_constant_needs_a_value_that_each_call_can_be_compared_with(tmp_path: Path) -> None:
    aot = re.sub("config = .*", "constants = { FLAG = true }\nconfig = [{ BLOCK = 64 }]", AOT)
    with pytest.raises(ConfigError, match=r"bool\(flag\)"):
        ops_of(project(tmp_path, aot, KERNELS.replace("FLAG=flag", "FLAG=bool(flag)")))


def test_values_of_heuristics_need_a_condition(tmp_path: Path) -> None:
    kernels = KERNELS.replace("@triton", "@triton.heuristics({'FLAG': lambda given: True})\n@triton", 1)
    with pytest.raises(ConfigError, match="FLAG has a value of the kernel's heuristics"):
        ops_of(project(tmp_path, kernels=kernels.replace("FLAG=flag, ", "")))


@pytest.mark.parametrize("name", EXAMPLES)
def test_ops_of_examples_are_completed_by_their_launch_functions(name: str) -> None:
    root, expected = ROOT / "examples" / "triton" / name, EXAMPLES[name]
    (op,) = (found for found in read_ops(root, aot_toml.read(root)) if found.name == expected["op"])
    assert (op.schema, len(list(variants(op)))) == (expected["schema"], expected["kernels"])


@pytest.mark.parametrize(
    ("types", "check"),
    [
        ("", 'aot::check_dtype(aot::dtype(y), "y", aot::dtype(x), "of the dtype of x");'),
        ('types = { x_ptr = "*fp32" }', 'const int dtype = aot::dtype_index(aot::dtype(y), "y", {'),
    ],
)
def test_the_dtype_of_an_output_is_checked(tmp_path: Path, types: str, check: str) -> None:
    """A kernel of another dtype would write past its end."""
    kernels = KERNELS.replace("x: torch.Tensor,", "x: torch.Tensor, y: torch.Tensor,").replace("like(x)", "like(y)")
    (op,) = ops_of(project(tmp_path, AOT.replace("divisible", f"{types}\ndivisible"), kernels))
    code, _ = select_language({}).sources(op, [], "kernels.py", {}).values()
    assert check in code


@pytest.mark.parametrize(
    "mistake",
    [*MISTAKES["triton"], *(pytest.param(text, marks=pytest.mark.attack) for text in MISTAKES["attack"])],
    ids=lambda mistake: mistake["message"],
)
def test_a_table_that_does_not_fit_is_an_error(tmp_path: Path, mistake: Mapping[str, str]) -> None:
    """As names, texts of attackers would be paths, which the builder writes outside of the sandbox."""
    assert mistake["old"] in AOT
    with pytest.raises(ConfigError) as caught:
        ops_of(project(tmp_path, AOT.replace(mistake["old"], mistake["new"])))
    assert mistake["message"] in f"{caught.value} {caught.value.hint}"
    assert mistake["where"] in str(caught.value.where)
    assert caught.value.hint


def test_functions_that_are_no_ops_or_have_other_parameters_are_an_error(tmp_path: Path) -> None:
    """The op would ignore a parameter that its schema does not have."""
    (op,) = ops_of(project(tmp_path))
    other = KERNELS.replace("flag: bool = False", "flag=False, *, kind=0")
    for text, message in (
        (KERNELS + "\ndef helper(x):\n    return x\n", "helper is neither a kernel nor an op"),
        (other, "scale has the parameters x, factor, flag, kind, and its schema has x, f"),
    ):
        with pytest.raises(ConfigError, match=message):
            python_code.module([op], text, "kernels.py", 1)


def test_a_constexpr_is_the_dtype_of_the_tensors(tmp_path: Path) -> None:
    kernels = KERNELS.replace("factor, FLAG:", "factor, TYPE: tl.constexpr, FLAG:").replace(
        "factor, FLAG=", "factor, TYPES[x.dtype], FLAG="
    )
    aot = AOT.replace('"float32"', '"float8_e5m2"') + 'constants = { TYPE = "tl.T" }\n'
    (op,) = ops_of(project(tmp_path / "a", aot, kernels))
    assert {variant.constants["TYPE"] for variant in variants(op)} == {"tl.float16", "tl.float8e5"}
    aot = re.sub("dtypes = .*", 'types = { x_ptr = "*fp32", out_ptr = "*fp32" }', aot)
    with pytest.raises(ConfigError, match="no dtypes are listed"):
        ops_of(project(tmp_path / "b", aot, kernels))


def test_only_python_projects_for_cuda_have_binaries(tmp_path: Path) -> None:
    made = project(tmp_path)
    (made.root / "build.toml").write_text(BUILD.replace('["cuda"]', '["xpu"]'))
    with pytest.raises(ConfigError, match="has none of them"):
        read_project(made.root)


@pytest.mark.parametrize(("text", "cpp", "kind"), MISTAKES["translated"])
def test_expressions_have_the_same_meaning_in_cpp(text: str, cpp: str, kind: str) -> None:
    made = expressions.translate(text, SCOPE, "aot.toml")
    assert (made.cpp, made.kind, made.python) == (cpp, kind, text)


@pytest.mark.parametrize(("text", "message"), MISTAKES["expression"])
def test_expressions_of_other_meaning_in_cpp_are_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expressions.translate(text, SCOPE, "aot.toml")


@pytest.mark.attack
@pytest.mark.parametrize("doc", ['ends in "', 'a """;run(); """', r"a \N, and \ at its end\ "])
def test_a_docstring_of_the_author_stays_one(tmp_path: Path, doc: str) -> None:
    text = KERNELS.replace('"""Return x * factor."""', f"r'''{doc}'''")
    (op,) = ops_of(project(tmp_path, kernels=text))
    functions = ast.parse(python_code.module([op], text, "kernels.py", 1)).body
    (scale,) = (node for node in functions if isinstance(node, ast.FunctionDef) and node.name == "scale")
    assert str(ast.get_docstring(scale)).strip() == doc.replace('"""', "'''").strip()


@pytest.mark.attack
def test_two_ops_cannot_have_one_source(tmp_path: Path) -> None:
    made = project(tmp_path, AOT.replace("scale]", "binding]"), KERNELS.replace("def scale(", "def binding("))
    tables = aot_toml.read(made.root)
    with pytest.raises(ConfigError, match="source of the same name"):
        sources(made.root, tables, "scale", read_ops(made.root, tables), [[]] * 12)
