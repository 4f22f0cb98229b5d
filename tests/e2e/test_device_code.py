"""The device code of `kernels/` compiles without a warning, for every capability, under nvcc and under clang.

`make device-code` runs it. It needs `clang-22` on the path, and CUDA_12_WHEELS must name a directory made by

    pip install --no-deps --target DIR nvidia-cuda-runtime-cu12==12.6.77 nvidia-cuda-nvcc-cu12==12.6.85 \
        nvidia-cuda-cccl-cu12==12.6.77

Wheels of CUDA 12 have no nvcc, so clang compiles for it. This takes minutes, so `make test` leaves it out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from tests.conftest import ROOT

CLANG = shutil.which("clang-22")
WHEELS = Path(os.environ.get("CUDA_12_WHEELS", "/nonexistent")) / "nvidia"
SOURCES = sorted(ROOT.glob("kernels/*/*_cuda/*.cu"))
CLANG_CAPABILITIES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90"]

pytestmark = [
    pytest.mark.device_code,
    pytest.mark.parametrize("source", SOURCES, ids=[str(path.relative_to(ROOT / "kernels")) for path in SOURCES]),
]


@pytest.fixture(scope="session")
def cuda_12(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Assemble a CUDA 12 toolkit for clang from the wheels, with `fatbinary` of CUDA 13, which they lack."""
    assert WHEELS.is_dir(), "CUDA_12_WHEELS names no directory of CUDA 12.6 wheels"
    tree = tmp_path_factory.mktemp("cuda-12")
    for wheel in ("cuda_runtime", "cuda_nvcc", "cuda_cccl"):
        shutil.copytree(WHEELS / wheel / "include", tree / "include", dirs_exist_ok=True)
    shutil.copytree(WHEELS / "cuda_nvcc" / "nvvm" / "libdevice", tree / "nvvm" / "libdevice")
    (tree / "include" / "curand_mtgp32_kernel.h").touch()  # clang includes it, and nothing here uses it
    (tree / "bin").mkdir()
    shutil.copy(WHEELS / "cuda_nvcc" / "bin" / "ptxas", tree / "bin")
    shutil.copy(Toolchains().cuda(Release(13, 0)).root / "bin" / "fatbinary", tree / "bin")
    for program in (tree / "bin").iterdir():
        program.chmod(0o755)
    return tree


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


def test_clang(source: Path, cuda_12: Path, tmp_path: Path) -> None:
    assert CLANG is not None, "clang-22 is not on the path"
    capabilities = [f"--cuda-gpu-arch={capability}" for capability in CLANG_CAPABILITIES]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    compiles([CLANG, "-x", "cuda", f"--cuda-path={cuda_12}", *capabilities, *warnings], source, tmp_path / "object")


@pytest.mark.parametrize("release", [Release(13, 0), Release(13, 2)], ids=str)
def test_nvcc(source: Path, release: Release, tmp_path: Path) -> None:
    toolkit = Toolchains().cuda(release)
    codes = [f"{major}{minor}" for major, minor in (str(known).split(".") for known in toolkit.capabilities)]
    targets = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
    warnings = ["-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror"]
    compiles([toolkit.nvcc, *targets, *warnings, "--expt-relaxed-constexpr"], source, tmp_path / "object")
