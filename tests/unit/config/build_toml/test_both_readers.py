"""Files of edition 5 that both readers accept, both reject, or only ours rejects, and the JSON schema."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from kernels._rust import Build

from kernel_builder import toml_file
from kernel_builder.backends import cuda
from kernel_builder.config import build_toml
from kernel_builder.config.project import TorchFramework
from kernel_builder.config.project_files import read_project
from kernel_format.errors import ConfigError
from tests.support.places import ROOT
from tests.unit.config.build_toml.conftest import (
    CASES,
    CPU,
    CUDA,
    TORCH,
    assert_same_values,
    framework,
    general,
    in_edition_6,
    kernel,
    more,
    texts,
    theirs,
    torch,
    write,
)

SCHEMA = ROOT / "kernel_builder/config/build.schema.json"
ACCEPTED = [
    *texts(CASES["accepted"]),
    general(backends='["cpu"]') + '[general.cuda]\nminver = "12.0"\n',
    general(backends='["cpu"]').replace(CPU + CUDA, ""),
    general().replace(CPU, ""),
    general(backends='["rocm"]').replace(TORCH + CPU + CUDA, "[torch-noarch]\n"),
    kernel("rocm", src='["a.cu"]')
    .replace('"cuda"]', '"cuda", "rocm"]', 1)
    .replace(TORCH, f'{TORCH}stable-abi = "2.10"\n'),
    *(kernel("cpu", depends=f'["{name}"]') for name in build_toml.SCHEMA["definitions"]["depends"]["items"]["enum"]),
    general().replace("\n", "\r\n"),
    "\ufeff" + general(),
    "torch.src = []\n" + framework(""),
    'kernel.z = {backend = "cpu", depends = [], src = ["a.cpp"]}\n'
    + general(backends='["cpu"]').replace(CPU + CUDA, ""),
]
REJECTED = [
    *texts(CASES["rejected"]),
    general().replace('backend = "cpu"\n', ""),
    general().replace('backend = "cpu"', "backend = 1"),
    general().replace('depends = ["torch"]\n', "", 1),
    general().replace('src = ["a.cpp"]\n', ""),
    "kernel = 1\n" + general().replace(CPU + CUDA, ""),
    general().replace(CPU + CUDA, "[[kernel]]\n"),
    *("", "general = 1\n", "[general\n", general().replace("\n", "\r")),
    "a" + ".a" * 450_000 + " = 1",
    "x = " + "[" * 5000 + "]" * 5000 + "\n" + general(),
]
# More that only our reader rejects: the message, the file.
STRICTER = [
    *((cases["message"], text) for cases in CASES["stricter"].values() for text in texts(cases)),
    (r"there is no (file|directory) ", kernel("cpu", src=f'["{"a" * 5000}"]')),
    *(
        (r"lists (cuda|rocm), but no \[kernel.<name>\] is for it", text)
        for text in (
            general().replace(CUDA, ""),
            torch('stable-abi = {rocm = "2.10"}').replace('"cuda"]', '"cuda", "rocm"]'),
            framework('[tvm-ffi]\nsrc = ["a.cpp"]').replace(CUDA, ""),
        )
    ),
    (r"has a key of more than 16 parts", more(f"# {'.a' * 400_000}")),
    (r"is larger than 1 MB", more("#" * 1_000_001)),
    (r"expected a table, got an array", 'kernel.x = ["cpu", [], [], [], []]\n' + general().replace(CPU + CUDA, "")),
]
UNKNOWN = {
    "[general]": general(zz="1"),
    **{f"[general.{name}]": more(f"[general.{name}]\nzz = 1\n") for name in ("hub", "cuda", "neuron", "tpu", "xpu")},
    "[torch]": torch("zz = 1"),
    "[torch-noarch]": framework("[torch-noarch]\nzz = 1"),
    "[tvm-ffi]": framework("[tvm-ffi]\nsrc = []\nzz = 1"),
    **{f"[kernel] for {name}": kernel(name, "zz = 1") for name in ("cpu", "cuda", "metal", "rocm", "xpu")},
    "backends": general(backends='["zz"]'),
    "backends with kernels": kernel("zz"),
    "depends": kernel("cpu", depends='["zz"]'),
}
# For JSON schema, an integral number is an integer; in Python, `$` matches before a newline.
NOT_IN_JSON = {in_edition_6(text) for text in (general(name='"ab\\n"'), general(version="1.0"), general(edition="5.0"))}


@pytest.mark.parametrize("text", ACCEPTED)
def test_both_accept(home: Path, text: str) -> None:
    write(home, text)
    assert_same_values(home)


@pytest.mark.parametrize(
    ("text", "parts"),
    [("13", (13, 0)), ("12.8.1", (12, 8, 1)), ("12.8.0", (12, 8)), ("13.0.0.0", (13, 0)), ("2.10", (2, 10))],
)
def test_versions_have_any_number_of_parts(home: Path, text: str, parts: tuple[int, ...]) -> None:
    """The public builder accepts them, though the parser in its client 0.17.2 takes two numbers only."""
    lines = f'minver = "{text}"\nmaxver = "{text}"\n'
    for_cuda = kernel("cuda", f'cuda-minver = "{text}"')
    write(home, for_cuda.replace("[torch]\n", f"[general.cuda]\n{lines}[torch]\n{lines}"))
    mine = read_project(home)
    assert isinstance(mine.framework, TorchFramework)
    settings = mine.backend_settings[cuda.CUDA]
    limits = [mine.framework.minver, mine.framework.maxver, settings["minver"], settings["maxver"]]
    assert [*limits, mine.kernels[-1].cuda_minver] == [parts] * 5
    assert str(settings["minver"]) == ".".join(map(str, parts))


def test_python_dependencies_are_those_of_the_client() -> None:
    known = json.loads((resources.files("kernels") / "python_depends.json").read_text())
    tables = build_toml.SCHEMA["properties"]["general"]["properties"]
    assert set(build_toml.PYTHON_DEPENDS) == set(known["general"])
    for backend in (backend for backend, names in known["backends"].items() if names):
        own = tables[backend]["properties"]["python-depends"]["items"]["enum"]
        assert set(own) == {*known["general"], *known["backends"][backend]}


def refused(home: Path, text: str) -> ConfigError:
    """Return the error with which our reader refuses a file."""
    write(home, text)
    with pytest.raises(ConfigError) as caught:
        read_project(home)
    error = caught.value
    assert error.where and error.where.startswith(str(home)) and error.hint
    return error


@pytest.mark.parametrize("text", REJECTED)
def test_both_reject(home: Path, text: str) -> None:
    assert refused(home, text).where.startswith(str(home / build_toml.FILE))  # type: ignore[union-attr]
    assert theirs(home) is None


@pytest.mark.parametrize(("message", "text"), STRICTER)
def test_only_our_reader_rejects(home: Path, message: str, text: str) -> None:
    assert re.search(message, refused(home, text).message)
    assert theirs(home) is not None


@pytest.mark.parametrize("text", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_both_expect_the_same_keys(home: Path, text: str) -> None:
    error = refused(home, text)
    with pytest.raises(ValueError, match="Expected one of ") as caught:
        Build.open(home)
    expected = set(str(caught.value).partition("Expected one of ")[2].strip().split(", "))
    # The public parser takes the key that tells the kinds of kernels apart out of the table first.
    found = set(re.findall(r"`([^`]+)`", error.message.partition("expected one of ")[2])) - {"language"}
    assert found == expected


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(build_toml.SCHEMA)


def test_every_build_toml_of_the_repository_is_valid() -> None:
    files = subprocess.check_output(["git", "ls-files", "*build.toml"], cwd=ROOT, text=True).splitlines()
    # The schema is of the newest edition, and tests read this project in edition 5.
    files = [name for name in files if "/templates/" not in name and name != "tests/projects/full-scale/build.toml"]
    checker = str(Path(sys.executable).with_name("check-jsonschema"))
    subprocess.run([checker, "--schemafile", str(SCHEMA), *files], cwd=ROOT, check=True)


def test_accepted_documents_are_valid(validator: jsonschema.Draft7Validator) -> None:
    for text in ACCEPTED:
        validator.validate(toml_file.parse(in_edition_6(text).removeprefix("\ufeff"), "build.toml"))


def test_rejected_documents_are_invalid(validator: jsonschema.Draft7Validator) -> None:
    valid = set()
    for text in map(in_edition_6, (text for text in REJECTED if len(text) < 10_000)):
        with suppress(ConfigError):
            if validator.is_valid(toml_file.parse(text, "build.toml")):
                valid.add(text)
    assert valid == NOT_IN_JSON
