"""Files of edition 5 that our reader and the public parser both accept or both reject, and the JSON schema."""

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
from kernel_builder.config import build_toml, known_backends
from kernel_builder.config.project import TorchFramework
from kernel_builder.config.project_files import read_project
from kernel_format.errors import ConfigError
from tests.support.places import ROOT
from tests.unit.config.build_toml import conftest
from tests.unit.config.build_toml.conftest import (
    CPU,
    CUDA,
    DEPENDENCY,
    TORCH,
    framework,
    general,
    in_edition_6,
    kernel,
    more,
    ours,
    torch,
    write,
)

SCHEMA = ROOT / "kernel_builder/config/build.schema.json"
ACCEPTED = [
    *(general(name=f'"{name}"') for name in conftest.NAMES[1:]),
    *(general(version=version) for version in ("0", "0x10", "9223372036854775807")),
    general(license='"""mit"""'),
    *(general(backends=f'["{backend}"]') for backend in known_backends.NAMES),
    general(backends='["cuda", "cuda", "cpu"]'),
    general(backends='["cpu"]'),  # [kernel.g] is for another backend
    *(
        general(source=f'"{url}"')
        for url in (
            "https://user@github.com/o/r",
            "https://git.example.org:8080/o/r",
            "git+ssh://git@github.com/o/r",
            "git@github.com:o/r.git",
        )
    ),
    general(upstream='"https://github.com/o/r"'),
    general(python_depends='["einops", "helion", "tvm-ffi"]'),
    general(kernel_depends=f"[{DEPENDENCY}]"),
    general(kernel_depends='[{repo-id = "o/k", revision = "main"}]'),
    more('[general.hub]\nrepo-id = "o/k"\nbranch = "v1"\n'),
    more('[general.cuda]\nminver = "12.6"\nmaxver = "13.2"\npython-depends = ["nvidia-cutlass-dsl"]\n'),
    *(more(f"[general.{b}]\nkernel-depends = [{DEPENDENCY}]\n") for b in ("cuda", "neuron", "xpu")),
    more('[general.neuron]\npython-depends = ["nki"]\n'),
    more('[general.xpu]\npython-depends = ["onednn", "einops"]\n'),
    general(backends='["cpu"]') + '[general.cuda]\nminver = "12.0"\n',
    framework("[torch]"),
    torch('include = [".", "inc"]'),
    torch('minver = "2.10"\nmaxver = "2.15"'),
    torch('minver = "02.08"'),
    torch('pyext = ["py", "json", "pyi"]'),
    torch('cxx-flags = ["-O2", ""]'),
    torch('stable-abi = "2.10"'),
    torch('stable-abi = {cpu = "2.9", cuda = "2.10"}'),
    torch('stable-abi = {rocm = "2.10"}'),
    torch('[torch.stable-abi]\ncuda = "2.10"'),
    framework("[torch-noarch]"),
    framework('[torch-noarch]\npyext = ["py"]\ncuda_capabilities = ["9.0"]\nrocm_archs = ["gfx90a"]'),
    framework('[tvm-ffi]\nsrc = ["a.cpp"]\ninclude = ["."]\npyext = ["py"]\ncxx-flags = ["-O2"]'),
    general(backends='["cpu"]').replace(CPU + CUDA, ""),
    general(backends='["cpu", "cuda"]').replace(CPU, ""),
    general(backends='["rocm"]').replace(TORCH + CPU + CUDA, "[torch-noarch]\n"),
    kernel("rocm", src='["a.cu"]')
    .replace('"cuda"]', '"cuda", "rocm"]', 1)
    .replace(TORCH, f'{TORCH}stable-abi = "2.10"\n'),
    *(kernel(b, 'include = ["inc"]', 'cxx-flags = ["-g"]') for b in ("cpu", "cuda", "metal", "rocm", "xpu")),
    kernel("cuda", 'cuda-capabilities = ["8.0", "9.0a", "10.0f", "12.0+PTX", "9.0a+PTX"]'),
    kernel("cuda", 'cuda-flags = ["-lineinfo"]', 'cuda-minver = "12.8"'),
    kernel("rocm", 'rocm-archs = ["gfx942"]', 'hip-flags = ["-O2"]'),
    kernel("xpu", 'sycl-flags = ["-O2"]'),
    *(kernel("cpu", depends=f'["{name}"]') for name in build_toml.SCHEMA["definitions"]["depends"]["items"]["enum"]),
    kernel("cpu", depends="[]", src="[]"),
    kernel("cpu", src='["a.cpp", "./a.cpp", "inc/a.h", "inc/a.h"]'),
    kernel("cuda", 'cuda-capabilities = ["11.8", "99.0"]'),
    *(kernel("cpu", name=name) for name in ("1", "_x", "A-b", '"a.b"', "torch")),
    general().replace("\n", "\r\n"),
    "\ufeff" + general(),
    "torch.src = []\n" + framework(""),
    'kernel.z = {backend = "cpu", depends = [], src = ["a.cpp"]}\n'
    + general(backends='["cpu"]').replace(CPU + CUDA, ""),
]
REJECTED = [
    *(general(**{key: None}) for key in ("name", "version", "license", "backends")),
    *(general(name=f'"{name}"') for name in ("", "a", "1a", "A-b", "a_b", "a-", "é", "../ab", "ab\\n")),
    *(general(version=v) for v in ("-1", "1.0", '"1"', "true", "9223372036854775808")),
    *(general(edition=v) for v in ("2", "7", '"5"', "5.0", "true")),
    *(general(license=v) for v in ("1", '["mit"]', "2020-01-01")),
    *(general(backends=v) for v in ('"cuda"', '["CUDA"]', "[1]", '[["cuda"]]')),
    *(general(source=f'"{url}"') for url in ("", "o/r", "file:///o/r", "ftp://h/o", "https://", "h:r")),
    general(source='"https://github.com:99999/o/r"'),
    general(upstream='"x"'),
    general(python_depends="[1]"),
    *(
        general(kernel_depends=f"[{item}]")
        for item in (
            '"o/k"',
            '{repo-id = "o/k"}',
            '{repo-id = "o/k", version = 1, revision = "main"}',
            '{repo-id = "o/k", version = -1}',
            '{repo-id = "o/k", version = 1, more = 1}',
        )
    ),
    *(general(**{key: '"x"'}) for key in ("python_version", "hub", "cuda", "universal")),
    *(more(f"[general.{backend}]\n") for backend in ("cann", "cpu", "metal", "rocm")),
    more('[general.xpu]\nminver = "1.0"\n'),
    *(more(f"[general.cuda]\nminver = {v}\n") for v in ("13.0", '"13..1"', '""', '"1３.0"')),
    *(more(f"{table}\n") for table in ("[test]", "[torch-noarch]", "[[torch]]", "[general]")),
    framework(""),
    framework("[[torch]]\nsrc = []"),
    framework('[tvm-ffi]\nsrc = ["a.cpp"]\nstable-abi = "2.10"'),
    framework('[torch-noarch]\ncuda-capabilities = ["9.0"]'),
    framework("[torch-noarch]\ncuda_capabilities = [9.0]"),
    *(
        torch(line)
        for line in (
            'src = "a.cpp"',
            "src = [1]",
            "minver = 2.8",
            'maxver = "v2.8"',
            "pyext = [1]",
            'cxx_flags = ["-O2"]',
            "stable-abi = 2.10",
            'stable-abi = "2.10.1"',
            'stable-abi = {gpu = "2.10"}',
            "stable-abi = {cuda = 2}",
        )
    ),
    *(kernel(backend) for backend in ("neuron", "CUDA", "")),
    general().replace('backend = "cpu"\n', ""),
    general().replace('backend = "cpu"', "backend = 1"),
    general().replace('depends = ["torch"]\n', "", 1),
    general().replace('src = ["a.cpp"]\n', ""),
    *(
        kernel(backend, line)
        for backend, line in (
            ("cpu", 'cuda-flags = ["-g"]'),
            ("cuda", 'rocm-archs = ["gfx942"]'),
            ("cuda", "cuda-minver = 13.0"),
            ("cuda", "cuda-capabilities = [9.0]"),
            ("rocm", 'sycl-flags = ["-g"]'),
            ("cpu", "[kernel.x.more]"),
        )
    ),
    *(kernel("cpu", depends=v) for v in ('["cutlass_3_7"]', '"torch"', "[1]")),
    "kernel = 1\n" + general().replace(CPU + CUDA, ""),
    general().replace(CPU + CUDA, "[[kernel]]\n"),
    "",
    "general = 1\n",
    "[general\n",
    general(license='"\\ud800"'),
    general().replace("\n", "\r"),
    more("# \0\n"),
    "a" + ".a" * 450_000 + " = 1",
    "x = " + "[" * 5000 + "]" * 5000 + "\n" + general(),
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
    conftest.assert_same_values(home)


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


@pytest.mark.parametrize("text", REJECTED)
def test_both_reject(home: Path, text: str) -> None:
    write(home, text)
    assert conftest.theirs(home) is None
    error = ours(home)
    assert isinstance(error, ConfigError)
    assert error.where
    assert error.where.startswith(str(home / build_toml.FILE))
    assert error.hint


@pytest.mark.parametrize("text", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_both_expect_the_same_keys(home: Path, text: str) -> None:
    write(home, text)
    with pytest.raises(ValueError, match="Expected one of ") as caught:
        Build.open(home)
    expected = set(str(caught.value).partition("Expected one of ")[2].strip().split(", "))
    error = ours(home)
    assert isinstance(error, ConfigError)
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
