"""Every kernel of `kernels/` is offered for all variants, and builds, on one x86_64 machine; its runtime libraries."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from kernel_builder import elf
from kernel_builder.backends import reading
from kernel_builder.backends.rocm import ROCM as BACKEND
from kernel_format.cache_directory import default_cache
from tests.integration.build_command.conftest import Copy, Run, run_python
from tests.support.optimization import without_optimization
from tests.support.places import CPU, CUDA, ROOT, SOURCES

BY_CLANG = CUDA.replace("cu130", "cu126")
ROCM = [CUDA.replace("cu130", f"rocm{digits}") for digits in ("71", "72")]
COMPILER = "aarch64-linux-gnu-g++"
KERNELS = [path.parent.name for path in sorted(ROOT.glob("kernels/*/build.toml"))]


def _on_arm(variant: str) -> str:
    return variant.replace("x86_64", "aarch64")


# nvcc and the cross compiler compile every kernel, the other compilers one. Device code takes most of the time: clang
# parses that of every kernel in `test_device_code.py`. `test_arm.py` builds a small project for all variants at once.
EACH = {CUDA, _on_arm(CPU)}
BUILT = {"geglu": {*EACH, _on_arm(BY_CLANG), ROCM[1]}, "blocks": {"torch-cpu", "torch-cuda"}}


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed")
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_builds_with_every_compiler(name: str, tmp_path: Path, kernel_builder: Run) -> None:
    """For one capability and without optimization; `make device-code` compiles all device code."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("build"))
    project = tmp_path / "kernels" / name
    text = re.sub("rocm-archs = .*", 'rocm-archs = ["gfx942"]', (project / "build.toml").read_text())
    (project / "build.toml").write_text(without_optimization(text))
    x86 = {CPU, CUDA, BY_CLANG}
    rocm = ROCM if "_rocm]" in text else []
    offered = BUILT[name] if name == "blocks" else {*x86, *map(_on_arm, x86), *rocm}
    listed = kernel_builder(default_cache(), "list-variants", project).answer
    assert {variant["variant"] for variant in listed if variant["buildable"]} == offered

    built = BUILT.get(name, EACH)
    chosen = [argument for variant in sorted(built) for argument in ("--variant", variant)]
    # The dependencies of blocks are loaded from the packages of this checkout.
    local = os.pathsep.join(f"kernels-community/{other}={ROOT / 'kernels' / other / 'build'}" for other in KERNELS)
    answer = kernel_builder.build(project, *chosen, "--capability", "9.0", cache=default_cache(), LOCAL_KERNELS=local)
    assert answer["unavailable"] == []
    assert {package["variant"] for package in answer["packages"]} == built
    for package in answer["packages"]:
        assert ("load" in package["passed-checks"]) == (package["variant"] == "torch-cpu"), package
        if package["variant"] in ROCM:
            assert package["checks"]["findings"] == []
            (binary,) = (project / "build" / package["variant"]).glob("*.so")
            assert {code.arch for code in BACKEND.device_code(binary, reading(binary))} == {"gfx942"}


@pytest.mark.slow
def test_the_runtime_libraries_of_a_kernel(copy_project: Copy, kernel_builder: Run) -> None:
    """Symbols of newer C++ headers are linked, state is shared, and OpenMP is Torch's."""
    project = copy_project("cpu-runtime")
    kernel_builder.build(project, "--variant", CPU, cache=default_cache())
    assert run_python(SOURCES["call_of_linux_variants"], project).splitlines() == ["0 0 3", "libgomp.so.1"]
    (binary,) = (project / "build" / CPU).glob("*.so")
    versions = {symbol.name: symbol.version for symbol in elf.read(binary).undefined}
    assert (versions["powf"], versions["expf"]) == ("GLIBC_2.2.5", "GLIBC_2.27")
    for shared in ("_ZSt4cout", "_ZNSt5ctypeIcE2idE", "_ZNSt6localeD1Ev"):
        assert versions[shared] == "GLIBCXX_3.4", shared
