"""Every kernel of `kernels/` builds for every variant of Linux that the Hub asks for, on one x86_64 machine."""

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


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed")
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_builds_for_every_variant_of_linux(name: str, tmp_path: Path, kernel_builder: Run) -> None:
    """Device code for one capability, and geglu's for ROCm; `make device-code` compiles all of it."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("build"))
    project = tmp_path / "kernels" / name
    settings = project / "build.toml"
    text = re.sub("rocm-archs = .*", 'rocm-archs = ["gfx942"]', settings.read_text())
    if name != "geglu":
        text = re.sub(r"(?s)\n\[kernel\.\w+_rocm\].*?(?=\n\[|\Z)", "", text.replace(', "rocm"', ""))
    settings.write_text(text)
    # What blocks depends on is loaded from the packages of this checkout.
    local = os.pathsep.join(f"kernels-community/{other}={ROOT / 'kernels' / other / 'build'}" for other in KERNELS)
    arguments = ("build", project, "--all-platforms", "--capability", "9.0")
    done = kernel_builder(default_cache(), *arguments, LOCAL_KERNELS=local)
    assert done.code == 0, done.stderr
    assert done.answer["unavailable"] == []

    noarch = {"torch-cpu", "torch-cuda"}
    x86 = {CPU, CUDA, BY_CLANG}
    rocm = {CUDA.replace("cu130", f"rocm{digits}") for digits in ("71", "72")} if name == "geglu" else set()
    linux = x86 | {_on_arm(variant) for variant in x86} | rocm
    assert {package["variant"] for package in done.answer["packages"]} == (noarch if name == "blocks" else linux)
    for package in done.answer["packages"]:
        assert ("load" in package["passed-checks"]) == (package["variant"] in {CPU, "torch-cpu"}), package
    if name != "blocks":
        assert _device_code(project / "build" / BY_CLANG) == _device_code(project / "build" / _on_arm(BY_CLANG))


def _on_arm(variant: str) -> str:
    return variant.replace("x86_64", "aarch64")


def _device_code(package: Path) -> bytes:
    (binary,) = package.glob("*.so")
    with binary.open("rb") as stream:
        return bytes(ELFFile(stream).get_section_by_name(".nv_fatbin").data())
