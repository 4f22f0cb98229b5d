"""Files that both readers of build.toml accept."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from kernel_builder.backends import cuda
from kernel_builder.config import build_toml, known_backends
from kernel_builder.config.project import TorchFramework
from kernel_builder.config.project_files import read_project
from tests.unit.config.build_toml.conftest import (
    CPU,
    CUDA,
    DEPENDENCY,
    NAMES,
    TORCH,
    assert_same_values,
    framework,
    general,
    kernel,
    more,
    torch,
    write,
)

ACCEPTED = [
    *(general(name=f'"{name}"') for name in NAMES[1:]),
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
