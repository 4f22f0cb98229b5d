"""Wheels of kernels: installed by pip into a fresh environment, imported, and used beside the client."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernel_builder.hub import project_sources
from tests.integration.build_command.conftest import FOR_CPU, Copy, Done, Run, untouched
from tests.support.files import append, replace, write_files
from tests.support.places import CPU, SOURCES
from tests.support.programs import run
from tests.support.python_project import write_project
from tests.support.torch_process import output_with_torch, run_with_torch

# Imports a kernel of the first directory.
IMPORT = "import sys; sys.path.insert(0, sys.argv[1]); import torch; "


def wheels(kernel_builder: Run, project: Path, *arguments: str | Path) -> Done:
    return kernel_builder(kernel_builder.cache, "wheel", project, "--no-load", *arguments)


@pytest.fixture
def cache(shared_cache: Path) -> Path:
    return shared_cache


@pytest.fixture
def built(copy_project: Copy, kernel_builder: Run) -> Path:
    """A project with a submodule and a package for this machine's CPU."""
    project = copy_project("stable-scale")
    init = project / "torch-ext/stable_scale/__init__.py"
    init.rename(init.with_name("layers.py"))
    init.write_text('from . import layers\nfrom .layers import scaled\n\n__all__ = ["layers", "scaled"]\n')
    kernel_builder.build(project, *FOR_CPU, "--owner", "org")
    return project


def pip(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def environment(tmp_path: Path) -> tuple[Path, Path]:
    """The interpreter and the packages of a new environment, with this interpreter's Torch."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    return environment / "bin" / "python", site


def test_pip_installs_a_wheel(kernel_builder: Run, built: Path, environment: tuple[Path, Path], tmp_path: Path) -> None:
    done = wheels(kernel_builder, built, "--version", "1.2")
    assert done.code == 0, done.stderr
    (written,) = done.answer["wheels"]
    wheel = Path(written.pop("path"))
    assert wheel == built / "dist" / "stable_scale-1.2-py3-none-manylinux_2_28_x86_64.whl"
    assert written == {"size": wheel.stat().st_size, "variants": [CPU], "requires": ["torch>=2.10"]}
    assert not [name for name in project_sources.published_files(built) if "dist" in str(name)]
    again = wheels(kernel_builder, built, "--version", "1.2", "--out", tmp_path / "again")
    assert Path(again.answer["wheels"][0]["path"]).read_bytes() == wheel.read_bytes()

    run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    shown = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", wheel))
    policies = [name.removesuffix("_x86_64") for name in (shown["sym_tag"], "manylinux_2_28_x86_64")]
    assert tuple(map(int, policies[0].split("_")[1:])) <= tuple(map(int, policies[1].split("_")[1:]))
    assert set(shown["external_libs"]) == {"libtorch_cpu.so"}  # Torch has loaded it

    python, site = environment
    assert pip(python, wheel).returncode == 0
    assert run(python, "-c", SOURCES["without_the_client"]) == "[0.0, 2.0, 4.0]\n"
    for order in (("wheel", "client"), ("client", "wheel")):
        beside = output_with_torch(SOURCES["beside_the_client"], site, built, *order)
        assert [line.split()[1] for line in beside.splitlines()] == ["2.0", "2.0"]

    # A variable chooses another backend than Torch's.
    chosen = run_with_torch(f"{IMPORT}import stable_scale", site, KERNEL_BACKEND="cuda")
    assert "no variant for this environment" in chosen.stderr and "KERNEL_BACKEND=cpu" in chosen.stderr

    # The error of a wheel for another Torch names its variants, the installed Torch and the remedy.
    variants = site / "stable_scale" / "build"
    (variants / CPU).rename(variants / "torch29-cxx11-cpu-x86_64-linux")
    missing = run_with_torch(f"{IMPORT}import stable_scale", site)
    for text in ("this wheel has: torch29-cxx11-cpu-x86_64-linux", f"Torch {torch.__version__}", "install a Torch"):
        assert text in missing.stderr
    # So does a wheel for another platform, which pip refuses but a copy of its files does not.
    (variants / "torch29-cxx11-cpu-x86_64-linux").rename(variants / CPU.replace("x86_64", "aarch64"))
    foreign = run_with_torch(f"{IMPORT}import stable_scale", site).stderr
    assert "this wheel is for aarch64-linux: install the one for x86_64-linux" in foreign
    other = wheel.with_name(wheel.name.replace("x86_64", "aarch64"))
    wheel.rename(other)
    assert "is not a supported wheel on this platform" in pip(python, other).stderr


AS_WITH_A_GPU = SOURCES["as_with_a_gpu"]


def test_an_import_refuses_a_gpu_without_code(copy_project: Copy, kernel_builder: Run, tmp_path: Path) -> None:
    project, driver = copy_project("python-only"), tmp_path / "driver.so"
    toml = project / "build.toml"
    toml.write_text(f'{toml.read_text().strip()}\ncuda_capabilities = ["8.0", "9.0a"]\n')
    kernel_builder.build(project, "--no-load")
    (written,) = wheels(kernel_builder, project).answer["wheels"]
    zipfile.ZipFile(written["path"]).extractall(tmp_path / "site")
    library = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-x", "c", "-", "-o", driver]
    subprocess.run(library, input=SOURCES["nvml"], text=True, check=True)
    assert output_with_torch(AS_WITH_A_GPU, tmp_path / "site", driver, GPU="8.6") == "False 2.0"
    refused = run_with_torch(AS_WITH_A_GPU, tmp_path / "site", driver, GPU="10.0").stderr
    for text in ("no code for this machine's GPU", "torch-cuda has code for: 8.0, 9.0a", "of the GPU: 10.0"):
        assert text in refused


def test_projects_without_valid_wheels_are_refused(kernel_builder: Run, built: Path) -> None:
    project = built

    def refused(code: int, texts: Sequence[str], *arguments: str) -> None:
        with untouched(project):
            done = wheels(kernel_builder, project, *arguments)
        assert done.code == code and all(text in str(done.answer) for text in texts), done

    refused(2, ["2.0 does not start with the kernel's version 1", "such as 1.3"], "--version", "2.0")
    refused(2, ["'one' is not a valid Python package version"], "--version", "one")
    metadata = project / "build" / CPU / "metadata.json"
    text = metadata.read_text()
    limited = json.loads(text)
    limited["provenance"]["capabilities-limited"] = ["9.0"]
    metadata.write_text(json.dumps(limited))
    refused(2, ["not a valid name for a package index"], "--name", "-x")  # before the checks
    refused(6, ["--capability 9.0", "expected all of the project's", "build without --capability"])
    metadata.write_text(text)
    replace(project / "scale/scale.h", "#pragma once", "#pragma once // later")
    refused(6, ["packages were not built from the project's sources"])
    (project / "build").rename(project / "elsewhere")
    refused(7, ["there is no package", f"kernel-builder build {project}"])
    replace(
        project / "build.toml", "backends =", 'kernel-depends = [{ repo-id = "a/b", revision = "main" }]\nbackends ='
    )
    refused(2, ["pip needs its version"])
    replace(project / "build.toml", 'revision = "main"', "version = 1")
    refused(2, ["kernel-depends has no c", "base=my-base"], "--depends", "c=my-c")
    append(project / "torch-ext/stable_scale/__init__.py", "from kernels import get_kernel_dep\n")
    refused(2, ["torch-ext", "write `from ._ops import get_kernel_dep`"])


def test_a_python_kernel_has_one_wheel_for_all(copy_project: Copy, kernel_builder: Run, tmp_path: Path) -> None:
    project = copy_project("python-only")
    replace(project / "build.toml", "backends =", 'python-depends = ["einops"]\nbackends =')
    append(project / "build.toml", '\n[general.cuda]\npython-depends = ["nvidia-cutlass-dsl"]\n')
    kernel_builder.build(project, "--no-load")
    (written,) = wheels(kernel_builder, project, "--name", "my-doubling").answer["wheels"]
    assert written["variants"] == ["torch-cpu", "torch-cuda"]
    assert written["requires"] == ["torch", "einops", 'nvidia-cutlass-dsl; extra == "cuda"']
    wheel = Path(written["path"])
    assert wheel.name == "my_doubling-1.0-py3-none-any.whl"
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = f"{IMPORT}import python_only; print(python_only.doubled(torch.ones(1)))"
    assert output_with_torch(code, tmp_path / "site") == "tensor([2.])"


def test_the_wheel_of_a_kernel_that_loads_another(
    kernel_builder: Run, built: Path, environment: tuple[Path, Path], tmp_path: Path
) -> None:
    top, dist, (python, site) = tmp_path / "top", tmp_path / "dist", environment
    write_project(top, SOURCES["kernel_with_a_dependency"], "stable-scale")
    local = f"org/top={top}:org/stable-scale={built}"
    kernel_builder.build(top, "--no-load")
    wheels(kernel_builder, built, "--name", "my-scale", "--out", dist)
    (written,) = wheels(kernel_builder, top, "--depends", "stable-scale=my-scale", "--out", dist).answer["wheels"]
    assert written["requires"] == ["torch", "my-scale<2,>=1"]
    assert pip(python, "--find-links", dist, "top").returncode == 0
    assert run(python, "-c", SOURCES["dependency_without_the_client"]) == "[0.0, 2.0, 4.0]\n"
    for order in (("wheel", "client"), ("client", "wheel")):
        output_with_torch(SOURCES["dependencies_beside_the_client"], site, *order, LOCAL_KERNELS=local)

    def refused(*texts: str) -> None:
        done = run_with_torch(f"{IMPORT}import top", site)
        for text in (
            "org/stable-scale, version 1, is needed",
            'pip install --force-reinstall "my-scale<2,>=1"',
            *texts,
        ):
            assert text in done.stderr, done.stderr

    replace(site / "stable_scale" / "build" / CPU / "metadata.json", '"version": 1', '"version": 2')
    refused("which is org/stable-scale, version 2")
    replace(site / "stable_scale" / "build" / CPU / "metadata.json", '"version": 2', '"version": 1')
    shutil.move(site / "stable_scale" / "build", site.parent)  # as those of a project's sources are
    refused("stable_scale/__init__.py, which is not the wheel of a kernel")
    shutil.rmtree(site.parent / "build")
    shutil.rmtree(site / "stable_scale")
    refused("`import stable_scale` finds: no module")
    write_files(site, {"stable_scale.py": "raise SystemExit('was run')"})
    refused("stable_scale.py, which is not the wheel of a kernel")
