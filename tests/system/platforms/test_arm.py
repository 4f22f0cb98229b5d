"""Binaries for aarch64 that x86_64 builds, and the kernels' own tests of them by emulation."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from kernel_builder import elf
from kernel_format.cache_directory import default_cache
from kernel_format.errors import BuildError, ToolchainError, VariantError
from kernel_format.metadata import PackageMetadata
from tests.integration.build_command.conftest import Copy, Run, assert_refused, run_python, untouched
from tests.support import emulated_python
from tests.support.files import replace
from tests.support.places import CPU, CUDA, ROOT, SOURCES
from tests.support.programs import run

ARM = "aarch64-linux"
BY_CLANG = CUDA.replace("cu130", "cu126")
ARM_CPU, ARM_CUDA, ARM_BY_CLANG = (name.replace("x86_64-linux", ARM) for name in (CPU, CUDA, BY_CLANG))
COMPILER = f"{ARM}-gnu-g++"

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed")


def _device_code(package: Path) -> bytes:
    (binary,) = package.glob("*.so")
    with binary.open("rb") as stream:
        return bytes(ELFFile(stream).get_section_by_name(".nv_fatbin").data())


@needs_compiler
def test_both_platforms_in_one_build(copy_project: Copy, kernel_builder: Run) -> None:
    project, cache = copy_project("stable-scale"), default_cache()
    answer = kernel_builder.build(project, "--platform", "all", cache=cache)
    packages = {package["variant"]: package for package in answer["packages"]}
    assert packages.keys() == {CPU, CUDA, BY_CLANG, ARM_CPU, ARM_CUDA, ARM_BY_CLANG}
    assert answer["unavailable"] == []
    assert "load" in packages[CPU]["passed-checks"]
    for name in (ARM_CPU, ARM_CUDA, ARM_BY_CLANG):
        assert "load" not in packages[name]["passed-checks"]
        assert "this machine is x86_64-linux" in packages[name]["skipped-checks"]["load"]
        (binary,) = (project / "build" / name).glob("*.so")
        assert elf.read(binary).machine == "aarch64"
        recorded = PackageMetadata.read(project / "build" / name)
        assert recorded is not None and recorded.provenance["cross-compiler"]["name"] == "g++"
    assert _device_code(project / "build" / BY_CLANG) == _device_code(project / "build" / ARM_BY_CLANG)
    assert "cross-compiler" not in (project / "build" / CPU / "metadata.json").read_text()
    assert "this package is for aarch64, and this machine is x86_64" in run_python(
        SOURCES["load_directly"], project / "build" / ARM_CPU
    )

    assert kernel_builder(cache, "build", project, "--platform", ARM).answer["steps"] == 0
    assert (project / "build" / CPU).is_dir(), "packages for other platforms stay"


@needs_compiler
@pytest.mark.parametrize(
    ("flags", "source", "message", "hint"),
    [
        ('["-mavx2"]', "", "-mavx2", "-mavx2 is for one platform only: select the instructions in the source"),
        ("[]", "#include <immintrin.h>\n", "immintrin.h", "immintrin.h is for one platform only"),
        ("[]", "#include <Python.h>\n", "which this machine does not have for aarch64-linux", "registration.h"),
    ],
)
def test_code_for_one_platform_is_refused(
    copy_project: Copy, kernel_builder: Run, flags: str, source: str, message: str, hint: str
) -> None:
    project = copy_project("stable-scale")
    replace(project / "build.toml", 'language = "cpp-cpu"', f'language = "cpp-cpu"\ncxx-flags = {flags}')
    replace(project / "scale/scale_cpu.cpp", "#include", f"{source}#include")
    with untouched(project):
        done = kernel_builder(default_cache(), "build", project, "--variant", ARM_CPU)
    error = ToolchainError if "Python" in source else BuildError
    assert_refused(done, (error, "scale_cpu.cpp", message, hint))


def test_a_compiler_for_another_platform_is_refused(
    project: Path, cache: Path, kernel_builder: Run, tmp_path: Path
) -> None:
    (tmp_path / "aarch64-linux-gnu-g++").symlink_to(shutil.which("g++") or "g++")
    with untouched(project):
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = kernel_builder(cache, "build", project, "--platform", ARM, PATH=path)
    assert_refused(done, (VariantError, project, "compiles for x86_64, expected aarch64", "apt"))


@pytest.mark.nightly
@needs_compiler
def test_the_tests_of_a_kernel_pass_by_emulation(tmp_path: Path, kernel_builder: Run) -> None:
    """The client loads the package, the results are right, and an exception of every op is Python's."""
    emulated = ROOT / ".venv/arm64/python"
    if not emulated.exists():
        pytest.skip(f"no Python for aarch64: {emulated_python.obstacle() or 'make arm64-python'}")
    project = tmp_path / "rmsnorm"
    shutil.copytree(ROOT / "kernels/rmsnorm", project, ignore=shutil.ignore_patterns("build"))
    kernel_builder.build(project, "--platform", ARM, "--backend", "cpu")
    tests = [project / "tests" / f"test_rmsnorm_{name}.py" for name in ("errors", "forward")]
    options = ["-q", "-p", "no:cacheprovider", "-m", "kernels_ci", "-k", "not dtype1"]
    run(emulated, "-m", "pytest", *options, *tests)
