"""A CUDA kernel is compiled for ROCm without anything of AMD; its code objects are checked, and do not run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernel_builder import checks, elf
from kernel_builder.backends.rocm import NOT_RUN
from kernel_builder.hub import card
from kernel_builder.hub.packages import HubPackage, without_untested
from kernel_format.cache_directory import default_cache
from kernel_format.errors import BuildError, CheckError
from kernel_format.metadata import PackageMetadata
from tests.integration.build_command.conftest import Copy, NewCache, Run
from tests.support.files import append, replace
from tests.support.places import ROOT, SOURCES
from tests.support.sample_package import assemble

VARIANTS = [f"torch-stable-abi210-rocm{digits}-x86_64-linux" for digits in ("71", "72")]
KERNEL = SOURCES["rocm_kernel"]


def with_rocm(root: Path) -> Path:
    replace(root / "build.toml", '["cpu", "cuda"]', '["rocm"]')
    append(root / "build.toml", KERNEL)
    (root / "scale/row_norm.cu").write_text(SOURCES["row_norm_of_rocm"])
    # Two sources with the header of bfloat16, whose functions are in both objects.
    replace(
        root / "scale/scale_cuda.cu", "#include <cuda_runtime.h>", "#include <cuda_bf16.h>\n#include <cuda_runtime.h>"
    )
    return root


def test_a_cuda_kernel_is_compiled_for_rocm(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    project = with_rocm(copy_project("stable-scale"))
    answer = kernel_builder.build(project, "--backend", "rocm", cache=default_cache())
    packages = [project / "build" / name for name in VARIANTS]
    (binary,) = packages[0].glob("*.so")
    assert {path.read_bytes() for package in packages for path in package.glob("*.so")} == {binary.read_bytes()}
    for built in answer["packages"]:
        assert built["skipped-checks"]["load"] == "this machine's Torch has no ROCm"
        assert "device-code" in built["checks"]["passed"]
        assert "load" not in built["checks"]["passed"]
    metadata = PackageMetadata.read(packages[0])
    assert metadata and metadata.archs == ("gfx942", "gfx1100") and metadata.status == NOT_RUN

    assert {"libtorch_cpu.so", "libtorch_hip.so"} < {*elf.read(binary).needed}
    assert not any("hip64" in library for library in elf.read(binary).needed)

    # The same bytes in another directory, with an empty cache.
    elsewhere = with_rocm(copy_project("stable-scale", "elsewhere/größer, too"))
    again = kernel_builder.build(elsewhere, "--variant", VARIANTS[1], "--no-load", cache=new_cache("empty"))
    assert again["compiles"] == 3
    assert (elsewhere / "build" / VARIANTS[1] / binary.name).read_bytes() == binary.read_bytes()

    # Packages that have not run on their hardware are published on request only, and the card names them.
    untested = {package.name: HubPackage(package) for package in packages}
    tested = {"torch-cpu": HubPackage(assemble(project / "other", "torch-cpu", None))}
    assert without_untested({**tested, **untested}, "") == tested
    with pytest.raises(CheckError, match=f"no package remains: {NOT_RUN}"):
        without_untested(untested, "")
    table = card._variants(untested)
    assert "Compiled and checked, not run on AMD hardware: " in table and "| 2.10 and later | 7.1 |" in table
    assert "not run" not in card._variants(tested)

    # Code for an architecture less, and one more.
    replace(packages[1] / "metadata.json", '"gfx1100"', '"gfx90a"')
    assert [finding.message for finding in next(checks.run_all([packages[1]], only=["device-code"])).findings] == [
        "has no code for gfx90a, which its metadata lists",
        "has code for gfx1100, which its metadata does not list",
    ]


@pytest.mark.device_code
@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in ROOT.glob("kernels/*/build.toml") if "_rocm]" in path.read_text())
)
def test_a_kernel_is_compiled_for_rocm(name: str, tmp_path: Path, kernel_builder: Run) -> None:
    """For the architectures of its list; `tests/system/platforms/test_linux_variants.py` compiles geglu for one."""
    ignored = shutil.ignore_patterns("build", "naive", "tests", "benchmarks")
    project = Path(shutil.copytree(ROOT / "kernels" / name, tmp_path / name, ignore=ignored))
    (built,) = kernel_builder.build(project, "--variant", VARIANTS[1], "--no-load", cache=default_cache())["packages"]
    assert built["checks"]["findings"] == []


def test_a_source_that_does_not_compile_is_named_with_its_line(copy_project: Copy, kernel_builder: Run) -> None:
    project = with_rocm(copy_project("stable-scale"))
    replace(project / "scale/scale_cuda.cu", "int64_t i =", 'asm("bar.sync 0;");\n  nvcuda::wmma::f(); int64_t i =')
    for other in ("torch-ext/torch_binding.cpp", "scale/row_norm.cu"):  # which would only take time
        (project / other).write_text("")
    expected = (BuildError, "scale/scale_cuda.cu", "scale_cuda.cu:9", "USE_ROCM")
    kernel_builder.refuse(project, "--backend", "rocm", expected=expected)


def test_the_example_for_metal_is_python_only(tmp_path: Path, kernel_builder: Run) -> None:
    shutil.copytree(ROOT / "examples/metal", tmp_path / "metal")
    answer = kernel_builder.build(tmp_path / "metal", "--backend", "metal")
    (built,) = answer["packages"]
    assert (built["variant"], answer["compiles"]) == ("torch-metal", 0)
    assert built["checks"]["findings"] == []
    page = (ROOT / "docs/hardware.md").read_text()
    assert (ROOT / "examples/metal/build.toml").read_text() in page
