"""Files that both readers of build.toml reject."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.config import build_toml
from kernel_format.errors import ConfigError
from tests.unit.config.build_toml.conftest import (
    CPU,
    CUDA,
    DEPENDENCY,
    framework,
    general,
    kernel,
    more,
    ours,
    theirs,
    torch,
    write,
)

REJECTED = [
    *(general(**{key: None}) for key in ("name", "version", "license", "backends")),
    *(general(name=f'"{name}"') for name in ("", "a", "1a", "A-b", "a_b", "a-", "-a", "a.b", "é", "../ab", "ab\\n")),
    *(general(version=v) for v in ("-1", "1.0", '"1"', "true", "9223372036854775808", "[1]")),
    *(general(edition=v) for v in ("0", "1", "2", "3", "4", "6", "255", '"5"', "5.0", "-1", "true")),
    *(general(license=v) for v in ("1", '["mit"]', "2020-01-01", "07:32:00", "{}")),
    *(general(backends=v) for v in ('"cuda"', '["CUDA"]', '["npu"]', "[1]", '[["cuda"]]', "[{cuda = 1}]")),
    *(
        general(source=f'"{url}"')
        for url in (
            "",
            "o/r",
            "./r",
            "/o/r",
            "github.com/o/r",
            "file:///o/r",
            "ftp://h/o",
            "https://",
            "h:r",
            "hf://o/r",
        )
    ),
    general(source='"https://github.com:99999/o/r"'),
    general(source="1"),
    general(upstream='"x"'),
    general(python_depends='"einops"'),
    general(python_depends="[1]"),
    *(
        general(kernel_depends=f"[{item}]")
        for item in (
            '"o/k"',
            '{repo-id = "o/k"}',
            "{version = 1}",
            '{repo-id = "o/k", version = 1, revision = "main"}',
            '{repo-id = "o/k", version = "1"}',
            '{repo-id = "o/k", version = -1}',
            '{repo-id = "o/k", revision = 1}',
            '{repo_id = "o/k", version = 1}',
            '{repo-id = "o/k", version = 1, more = 1}',
        )
    ),
    *(general(**{key: '"x"'}) for key in ("description", "python_version", "hub", "cuda", "universal")),
    *(more(f"[general.hub]\n{line}\n") for line in ('repo_id = "o/k"', "branch = 1", "more = 1")),
    *(more(f"[general.{backend}]\n") for backend in ("cann", "cpu", "metal", "rocm")),
    more('[general.xpu]\nminver = "1.0"\n'),
    more(f"[general.tpu]\nkernel-depends = [{DEPENDENCY}]\n"),
    *(more(f"[general.cuda]\nminver = {v}\n") for v in ("13.0", '"x"', '"13..1"', '""', '"13."', '"1３.0"')),
    *(more(f"{table}\n") for table in ("[test]", "[kernels.x]", "[torch-noarch]", "[tvm-ffi]", "[[torch]]")),
    "more = 1\n" + general(),
    framework(""),
    framework("[[torch]]\nsrc = []"),
    framework("[Torch]"),
    framework("[tvm-ffi]"),
    *(
        framework(f'[tvm-ffi]\nsrc = ["a.cpp"]\n{line}')
        for line in ('minver = "2.8"', 'stable-abi = "2.10"', "more = 1")
    ),
    *(
        framework(f"[torch-noarch]\n{line}")
        for line in (
            'cuda-capabilities = ["9.0"]',
            'rocm-archs = ["gfx90a"]',
            'src = ["a.cpp"]',
            'minver = "2.8"',
            "cuda_capabilities = [9.0]",
            'pyext = "py"',
        )
    ),
    *(
        torch(line)
        for line in (
            'src = "a.cpp"',
            "src = [1]",
            'include = "."',
            "minver = 2.8",
            'maxver = "v2.8"',
            'pyext = "py"',
            "pyext = [1]",
            'cxx-flags = "-O2"',
            'cxx_flags = ["-O2"]',
            'stable_abi = "2.10"',
            "stable-abi = 2.10",
            "stable-abi = true",
            'stable-abi = "2.10.1"',
            'stable-abi = ["2.10"]',
            'stable-abi = {gpu = "2.10"}',
            "stable-abi = {cuda = 2}",
            "universal = true",
            "more = 1",
        )
    ),
    *(kernel(backend) for backend in ("cann", "neuron", "tpu", "CUDA", "gpu", "")),
    general().replace('backend = "cpu"\n', ""),
    general().replace('backend = "cpu"', "backend = 1"),
    general().replace('depends = ["torch"]\n', "", 1),
    general().replace('src = ["a.cpp"]\n', ""),
    *(
        kernel(backend, line)
        for backend, line in (
            ("cpu", 'cuda-flags = ["-g"]'),
            ("cpu", 'cuda-capabilities = ["9.0"]'),
            ("cuda", 'hip-flags = ["-g"]'),
            ("cuda", 'rocm-archs = ["gfx942"]'),
            ("cuda", 'cuda_flags = ["-g"]'),
            ("cuda", 'language = "cuda"'),
            ("cuda", "cuda-minver = 13.0"),
            ("cuda", 'cuda-capabilities = "9.0"'),
            ("cuda", "cuda-capabilities = [9.0]"),
            ("cuda", 'cuda-flags = "-g"'),
            ("metal", 'sycl-flags = ["-g"]'),
            ("rocm", 'sycl-flags = ["-g"]'),
            ("xpu", 'hip-flags = ["-g"]'),
            ("cpu", "[kernel.x.more]"),
        )
    ),
    *(kernel("cpu", depends=v) for v in ('["cutlass_3_7"]', '["Torch"]', '"torch"', "[1]", '[["torch"]]')),
    *(kernel("cpu", src=v) for v in ('"a.cpp"', "[1]", "{}")),
    "kernel = 1\n" + general().replace(CPU + CUDA, ""),
    general().replace(CPU + CUDA, "[kernel]\nx = 1\n"),
    general().replace(CPU + CUDA, "[[kernel]]\n"),
    torch("universal = true").replace("edition = 5\n", ""),
    general(edition=None, version=None),
    "",
    "general = 1\n",
    "[general\n",
    more("[general]\n"),
    general() + 'backend = "cpu"\n',
    general(license='"a\\e"'),
    general(license='"\\ud800"'),
    general().replace("\n", "\r"),
    more("# \0\n"),
    more("[kernel.é]\n"),
    "a" + ".a" * 450_000 + " = 1",
    "x = {" + """.'"' . "\\"" """ * 50_000 + " = 1}",
    "x = " + "[" * 5000 + "]" * 5000 + "\n" + general(),
]


@pytest.mark.parametrize("text", REJECTED)
def test_both_reject(home: Path, text: str) -> None:
    write(home, text)
    assert theirs(home) is None
    error = ours(home)
    assert isinstance(error, ConfigError)
    assert error.where
    assert error.where.startswith(str(home / build_toml.FILE))
    assert error.hint
