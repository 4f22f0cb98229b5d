"""A back end that another package registers: its variants are offered, built, checked and published.

`tests/toy_backend` is all that it is; the builder knows nothing of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder import elf
from tests.support.places import ROOT
from tests.support.running_hub import RunningHub

from .conftest import BUILDER

REPO = "kernels-community/stable-scale"
VARIANTS = ["torch-stable-abi210-cann80-x86_64-linux", "torch-stable-abi210-cann81-x86_64-linux"]
KERNEL = """
[kernel.scale_toy]
backend = "cann"
depends = []
src = ["scale/scale.toy", "scale/scale.h"]
toy-archs = ["t1", "t2"]
"""
SOURCE = """
#include "scale.h"
#if defined(CANN_KERNEL) && defined(USE_TOY) && defined(TOY_T1)
void scale(float* out, const float* in, float factor, int64_t count, void*) {
  toy_launch(count);
  for (int64_t i = 0; i < count; ++i) out[i] = factor * in[i];
}
#endif
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def project(copy_project: Callable[..., Path]) -> Path:
    """A project whose only compiled kernel is for the toy device, and which has a CPU variant."""
    root = copy_project("stable-scale")
    settings = (root / "build.toml").read_text()
    (root / "build.toml").write_text(settings.replace('["cpu", "cuda"]', '["cpu", "cann"]') + KERNEL)
    (root / "scale/scale.toy").write_text(SOURCE)
    return root


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python with the toy back end's package."""
    site = tmp_path / "site"
    for name in ("toy.py", "toy.toml"):
        site.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / "toy_backend" / name, site)
    described = site / "toy_backend-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[kernel_builder.backends]\ncann = toy:TOY\n")
    return {**os.environ, "PYTHONPATH": str(site)}


def run(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [BUILDER, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_registered_back_end_is_built_checked_and_published(
    project: Path, installed: dict[str, str], new_cache: Callable[[str], Path], hub: RunningHub
) -> None:
    environment = {**installed, "KERNEL_BUILDER_CACHE": str(new_cache("cache"))}
    listed = json.loads(run(environment, "list-variants", "--json", "--arch", project).stdout)
    assert [(row["variant"], row.get("cann"), row["cuda"]) for row in listed if row["backend"] == "cann"] == [
        (VARIANTS[0], "8.0", None),
        (VARIANTS[1], "8.1", None),
    ]
    built = run(environment, "build", project, "--backend", "cann", "--json")
    assert built.returncode == 0, built.stdout + built.stderr
    summary = json.loads(built.stdout)
    assert [package["variant"] for package in summary["packages"]] == VARIANTS
    assert summary["compiles"] == 4  # the device code of each release, whose architectures differ, and its binding

    for variant, archs in zip(VARIANTS, (["t1"], ["t1", "t2"]), strict=True):
        package = project / "build" / variant
        assert json.loads((package / "metadata.json").read_text())["backend"] == {"type": "cann", "archs": archs}
        assert elf.read(next(package.glob("*.so"))).needed[:2] == ("libtorch_cpu.so", "libtoy.so.1")
        checked = run(environment, "check-abi", package)
        assert checked.returncode == 0, checked.stdout + checked.stderr

    environment = {**environment, **hub.environment, "PYTHONPATH": installed["PYTHONPATH"]}
    sent = run(environment, "upload", project, "--repo-id", REPO, "--output-json")
    assert sent.returncode == 0, sent.stdout + sent.stderr
    assert json.loads(sent.stdout)["variants"] == VARIANTS
    card = Path(hub.api().hf_hub_download(REPO, "README.md", repo_type="kernel", local_dir=project.parent)).read_text()
    assert "| variant | Torch | Toy | capabilities | size |" in card


def test_a_package_that_is_missing_or_broken_is_named(
    project: Path, installed: dict[str, str], new_cache: Callable[[str], Path]
) -> None:
    settings = project / "build.toml"
    settings.write_text(settings.read_text().replace('toy-archs = ["t1", "t2"]\n', ""))
    environment = {**os.environ, "KERNEL_BUILDER_CACHE": str(new_cache("cache"))}
    refused = run(environment, "build", project, "--backend", "cann")
    assert refused.returncode == 2, refused.stderr
    broken = {**installed, "KERNEL_BUILDER_CACHE": environment["KERNEL_BUILDER_CACHE"]}
    (Path(installed["PYTHONPATH"]) / "toy.py").write_text("import nothing_of_this_name\n")
    done = run(broken, "build", project, "--backend", "cann")
    assert "entry point toy:TOY" in done.stderr and "install the package that registers it again" in done.stderr
