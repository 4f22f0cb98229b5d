"""Builds of a project give packages that the unmodified client loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from kernels import Metadata  # type: ignore[attr-defined]

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from tests.integration.build_command.conftest import (
    LOAD,
    Copy,
    NewCache,
    Run,
    assert_refused,
    replace,
    run_python,
    untouched,
)
from tests.support.places import CPU, CUDA

LOAD_AS_OLD_CLIENTS_DO = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("any_name", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["any_name"] = module
spec.loader.exec_module(module)
print(module.scaled(torch.tensor([3.0]), 2.0).tolist())
"""


LOAD_TWO = """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
one, two = (get_local_kernel(Path(path)) for path in sys.argv[1:])
print(one.scaled(torch.ones(1), 2.0).item(), two.scaled(torch.ones(1), 2.0).item())
"""


def test_stable_abi_project(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    """Variants share binaries; the client loads the result; a second build runs no step."""
    project = copy_project("stable-scale", "a project, größer")
    cache = new_cache("cache")
    done = kernel_builder(cache, "build", project, "--all", "--no-load")
    assert done.code == 0, done
    packages = {package["variant"]: package for package in done.answer["packages"]}
    # One step for each source, backend and CUDA compiler: two sources, for the CPU, clang, and nvcc of three releases.
    assert done.answer["compiles"] == 2 * 5
    assert len({package["module"] for package in packages.values()}) == 5
    assert len(packages) == 30
    assert CPU in packages["torch213-cxx11-cpu-x86_64-linux"]["shares-binary-with"]
    missing = {variant["variant"]: variant for variant in done.answer["unavailable"]}
    assert missing and all(name.endswith("-aarch64-linux") for name in missing)
    assert "torch-stable-abi210-cpu-aarch64-linux" in missing

    assert run_python(LOAD, project) == "[0.0, 2.0, 4.0]"
    assert run_python(LOAD_AS_OLD_CLIENTS_DO, project / "build" / CPU / "stable_scale" / "__init__.py") == "[6.0]"
    metadata = Metadata.read_from_file(project / "build" / CUDA / "metadata.json")
    assert metadata.id == packages[CUDA]["module"]
    assert metadata.backend.archs == ["9.0"]

    again = kernel_builder(cache, "build", project, "--all", "--no-load")
    assert again.answer["steps"] == 0
    assert {package["status"] for package in again.answer["packages"]} == {"unchanged"}


def test_a_changed_source_recompiles_itself_and_the_binding_and_both_versions_load(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run
) -> None:
    project, cache = copy_project("stable-scale"), new_cache("cache")
    before = kernel_builder(cache, "build", project, "--backend", "cpu", "--no-load", "--out", project / "one")
    unused = cache / "objects" / "aa" / "unused.o"
    unused.parent.mkdir(exist_ok=True)
    unused.touch()
    os.utime(unused, (0, 0))
    source = project / "scale" / "scale_cpu.cpp"
    source.write_text(source.read_text().replace("factor * in[i]", "factor * in[i] + 1"))
    after = kernel_builder(cache, "build", project, "--backend", "cpu", "--no-load")
    assert (after.answer["compiles"], after.answer["steps"]) == (2, 3)
    # A build removes outputs that no build has used for a month.
    assert not unused.exists()
    assert after.answer["packages"][0]["module"] != before.answer["packages"][0]["module"]
    assert run_python(LOAD_TWO, project / "one", project / "build") == "2.0 3.0"

    python = project / "torch-ext" / "stable_scale" / "__init__.py"
    python.write_text(python.read_text() + "# changed\n")
    # Two versions of the Python files must not register under one namespace, so the binding is compiled again.
    renamed = kernel_builder(cache, "build", project, "--backend", "cpu", "--no-load")
    assert (renamed.answer["compiles"], renamed.answer["steps"]) == (1, 2)


def test_several_projects_are_built_by_one_command(
    copy_project: Copy, shared_cache: Path, kernel_builder: Run, tmp_path: Path
) -> None:
    first, second = copy_project("stable-scale", "one"), copy_project("python-only", "two")
    out = tmp_path / "out"
    done = kernel_builder(shared_cache, "build", first, second, "--backend", "cpu", "--no-load", "--out", out)
    assert done.code == 0, done
    assert sorted(path.name for path in out.iterdir()) == ["python-only", "stable-scale"]
    assert (out / "python-only" / "torch-cpu" / "metadata.json").is_file()


def test_cuda_home_names_the_toolkit_to_build_with(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path
) -> None:
    """The toolkit of this test is a copy of the pinned one. Its nvcc records that it runs."""
    pinned, toolkit, calls = toolkits.toolkit(Toolchains(), Release(13, 0)).root, tmp_path / "cuda", tmp_path / "calls"
    shutil.copytree(pinned, toolkit, copy_function=os.symlink)
    nvcc = toolkit / "bin" / "nvcc"
    nvcc.parent.chmod(0o755)
    nvcc.unlink()
    nvcc.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {pinned}/bin/nvcc "$@"\n')
    nvcc.chmod(0o755)
    project = copy_project("stable-scale")
    options = ("--variant", CUDA, "--no-load", "--cuda-home", toolkit, "--sandbox", "off")
    done = kernel_builder(new_cache("cache"), "build", project, *options)
    assert done.code == 0, done
    assert "scale_cuda.cu" in calls.read_text()


@pytest.mark.parametrize("file", ["torch-cpu/notes.txt", None])
def test_other_files_in_the_place_of_a_package_are_not_replaced(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path, file: str | None
) -> None:
    project = copy_project("python-only")
    place = project / "build" / (file or "torch-cpu")
    place.parent.mkdir(parents=True)
    if file:
        place.write_text("mine")
    else:
        place.symlink_to(tmp_path)
    with untouched(project):
        done = kernel_builder(new_cache("cache"), "build", project, "--backend", "cpu", "--no-load")
    assert_refused(done, 6, "PackageError", where="build/torch-cpu", message="is not a package", hint="move or remove")


def test_packages_of_another_kernel_are_not_replaced(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run, tmp_path: Path
) -> None:
    first, second, out = copy_project("python-only", "one"), copy_project("python-only", "two"), tmp_path / "out"
    replace(second / "build.toml", 'name = "python-only"', 'name = "python-two"')
    (second / "torch-ext/python_only").rename(second / "torch-ext/python_two")
    cache, options = new_cache("cache"), ("--backend", "cpu", "--no-load", "--out", out)
    assert kernel_builder(cache, "build", first, *options).code == 0
    with untouched(out):
        done = kernel_builder(cache, "build", second, *options)
    assert_refused(done, 6, "PackageError", where=str(out), message="another kernel than python-two", hint="--out")


def test_other_files_in_build_are_kept(copy_project: Copy, shared_cache: Path, kernel_builder: Run) -> None:
    project = copy_project("python-only")
    (project / "build" / "notes").mkdir(parents=True)
    (project / "build" / "notes" / "mine.txt").write_text("mine")
    old = project / "build" / "torch29-cxx11-cpu-x86_64-linux"
    old.mkdir()
    (old / "metadata.json").write_text("{}")
    assert kernel_builder(shared_cache, "build", project, "--variant", "torch-cpu", "--no-load").code == 0
    assert old.exists()
    assert kernel_builder(shared_cache, "build", project, "--no-load").code == 0
    # The project no longer offers this variant, so a full build removes it.
    assert sorted(path.name for path in (project / "build").iterdir()) == ["notes", "torch-cpu", "torch-cuda"]
    assert (project / "build" / "notes" / "mine.txt").read_text() == "mine"
    assert sorted(path.name for path in project.iterdir()) == ["build", "build.toml", "torch-ext"]
