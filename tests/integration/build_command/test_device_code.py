"""The device code of `kernels/` compiles without a warning, for every capability, under nvcc and under clang.

`make device-code` compiles it, which takes minutes. `make test` only has clang parse it, for one capability.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernel_builder.backends.cuda import toolkits
from kernel_builder.backends.cuda.releases import known_capabilities
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from tests.support.places import ROOT

SOURCES = sorted([*ROOT.glob("kernels/*/*_cuda/*.cu"), *ROOT.glob("kernels/*/naive/*.cu")])

pytestmark = pytest.mark.parametrize(
    "source", SOURCES, ids=[str(path.relative_to(ROOT / "kernels")) for path in SOURCES]
)


def compiles(command: Sequence[str | Path], source: Path, output: Path) -> None:
    """Compile with the project's root as include directory; any output is a failure."""
    include = f"-I{source.parent.parent}"
    done = subprocess.run(
        [*command, "-std=c++17", "-O3", "-DNDEBUG", include, "-c", source, "-o", output],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def clang(tools: Toolchains) -> list[str | Path]:
    """Return clang's command for CUDA 12, without a capability."""
    toolkit = toolkits.toolkit(tools, Release(12, 6))
    assert toolkit.clang is not None
    places = [f"-resource-dir={toolkit.clang.root}", f"--cuda-path={toolkit.root}"]
    gxx = f"--gcc-install-dir={tools.host().install}"
    return [toolkit.clang.root / "zig", "clang", "--target=x86_64-linux-gnu", "-x", "cuda", *places, gxx]


def test_clang_warns_of_nothing(source: Path, tmp_path: Path) -> None:
    # Without a second pass for the host, which parses the same code without that of __CUDA_ARCH__.
    target = ["--offload-arch=sm_90", "--cuda-device-only", "-fsyntax-only", "-Wno-unused-command-line-argument"]
    compiles([*clang(Toolchains()), *target, "-Wall", "-Wextra", "-Werror"], source, tmp_path / "none")


@pytest.mark.device_code
def test_clang(source: Path, tmp_path: Path) -> None:
    tools = Toolchains()
    known = known_capabilities()  # CUDA 12 has older ones, which the kernels are not written for
    capabilities = [capability for capability in known[Release(12, 8)] if capability in known[Release(13, 0)]]
    targets = [f"--offload-arch=sm_{capability.replace('.', '')}" for capability in capabilities]
    compiles([*clang(tools), *targets, "-Wall", "-Wextra", "-Werror"], source, tmp_path / "object")


@pytest.mark.device_code
def test_clang_keeps_arrays_in_registers(source: Path, tmp_path: Path) -> None:
    """No element is chosen by its address, and no copy of floats is split into bytes."""
    ptx = tmp_path / "ptx"
    without_c = "-Wno-unused-command-line-argument"  # -S goes before it
    compiles([*clang(Toolchains()), "--offload-arch=sm_90", "--cuda-device-only", "-S", without_c], source, ptx)
    assert re.findall(r"(?:ld|st)\.local.*|st\.\w+\.b8 .*%r\d+;", ptx.read_text()) == []


@pytest.mark.device_code
@pytest.mark.parametrize("release", [Release(13, 0), Release(13, 2)], ids=str)
def test_nvcc(source: Path, release: Release, tmp_path: Path) -> None:
    toolkit = toolkits.toolkit(Toolchains(), release)
    codes = [f"{major}{minor}" for major, minor in (str(known).split(".") for known in known_capabilities()[release])]
    targets = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
    warnings = ["-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror"]
    assert toolkit.nvcc is not None
    compiles([toolkit.nvcc, *targets, *warnings, "--expt-relaxed-constexpr"], source, tmp_path / "object")
