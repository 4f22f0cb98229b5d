"""Every kernel of `kernels/` builds with every compiler and for every platform of Linux, on one x86_64 machine."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from kernel_builder.cache_directory import default_cache
from tests.integration.build_command.conftest import Run
from tests.support.places import CPU, CUDA, ROOT

BY_CLANG = CUDA.replace("cu130", "cu126")
COMPILER = "aarch64-linux-gnu-g++"
KERNELS = [path.parent.name for path in sorted(ROOT.glob("kernels/*/build.toml"))]
# Builds for all variants. nvcc and clang compile the others once each, for one platform each: most of the time is that
# of device code, which is compiled for each platform again.
WHOLE = "geglu"


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed")
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_builds_with_every_compiler_for_every_platform(
    name: str, tmp_path: Path, kernel_builder: Run
) -> None:
    """Device code for one capability, and geglu's for ROCm; `make device-code` compiles all of it."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("build"))
    project = tmp_path / "kernels" / name
    settings = project / "build.toml"
    text = re.sub("rocm-archs = .*", 'rocm-archs = ["gfx942"]', settings.read_text())
    if name != WHOLE:
        text = re.sub(r"(?s)\n\[kernel\.\w+_rocm\].*?(?=\n\[|\Z)", "", text.replace(', "rocm"', ""))
    settings.write_text(text)
    x86 = {CPU, CUDA, BY_CLANG}
    rocm = {CUDA.replace("cu130", f"rocm{digits}") for digits in ("71", "72")} if name == WHOLE else set()
    offered = {"torch-cpu", "torch-cuda"} if name == "blocks" else x86 | {_on_arm(variant) for variant in x86} | rocm
    listed = kernel_builder(default_cache(), "list-variants", project).answer
    assert {variant["variant"] for variant in listed if variant["buildable"]} == offered

    built = offered if name in (WHOLE, "blocks") else {CPU, CUDA, _on_arm(CPU), _on_arm(BY_CLANG)}
    chosen = [argument for variant in sorted(built) for argument in ("--variant", variant)]
    # What blocks depends on is loaded from the packages of this checkout.
    local = os.pathsep.join(f"kernels-community/{other}={ROOT / 'kernels' / other / 'build'}" for other in KERNELS)
    arguments = ("build", project, *(["--all-platforms"] if built == offered else chosen), "--capability", "9.0")
    done = kernel_builder(default_cache(), *arguments, LOCAL_KERNELS=local)
    assert done.code == 0, done.stderr
    assert done.answer["unavailable"] == []
    assert {package["variant"] for package in done.answer["packages"]} == built
    for package in done.answer["packages"]:
        assert ("load" in package["passed-checks"]) == (package["variant"] in {CPU, "torch-cpu"}), package
    if name == WHOLE:
        assert _device_code(project / "build" / BY_CLANG) == _device_code(project / "build" / _on_arm(BY_CLANG))


def _on_arm(variant: str) -> str:
    return variant.replace("x86_64", "aarch64")


def _device_code(package: Path) -> bytes:
    (binary,) = package.glob("*.so")
    with binary.open("rb") as stream:
        return bytes(ELFFile(stream).get_section_by_name(".nv_fatbin").data())
