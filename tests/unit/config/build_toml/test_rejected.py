"""Files that both readers of build.toml reject."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder.config import build_toml
from kernel_format.errors import ConfigError
from tests.unit.config.build_toml.conftest import (
    CPU,
    CUDA,
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
    *(general(name=f'"{name}"') for name in ("", "a", "1a", "A-b", "a_b", "a-", "é", "../ab", "ab\\n")),
    *(general(version=v) for v in ("-1", "1.0", '"1"', "true", "9223372036854775808")),
    *(general(edition=v) for v in ("2", "4", "7", '"5"', "5.0", "true")),
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


@pytest.mark.parametrize("text", REJECTED)
def test_both_reject(home: Path, text: str) -> None:
    write(home, text)
    assert theirs(home) is None
    error = ours(home)
    assert isinstance(error, ConfigError)
    assert error.where
    assert error.where.startswith(str(home / build_toml.FILE))
    assert error.hint
