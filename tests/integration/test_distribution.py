"""The distributions: one version, complete wheels, and a working command line from the installed wheels."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import tomli
from packaging.requirements import Requirement

from kernel_builder.steps.ninja_run import find_ninja
from tests.support import programs
from tests.support.git import commit_all, git
from tests.support.places import CUDA, LIBRARIES, ROOT
from tests.support.triton_store import require_triton
from tests.unit.aot.test_declaration import project

TRACKED = ("LICENSE", "README.md", "kernel_builder", "kernels/kit", "packages", "pyproject.toml")
# Directory of a distribution -> its import package.
NAMES = ("format", "sandbox", "aot", "emulator", "hub", "judge", "skills", "tasks")
DISTRIBUTIONS = {".": "kernel_builder"} | {f"packages/kernel-{name}": f"kernel_{name}" for name in NAMES}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    # As after an installation: no source tree on the import path.
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return programs.run(*command, cwd=cwd, env={**clean, **environment}, timeout=300)


def project_table(directory: str) -> dict[str, Any]:
    table: dict[str, Any] = tomli.loads((ROOT / directory / "pyproject.toml").read_text())["project"]
    return table


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the distributions, in a git repository of their own."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in TRACKED:
        source, target = ROOT / name, tree / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
        else:
            shutil.copyfile(source, target)
    commit_all(tree)
    return tree


@pytest.fixture(scope="module")
def wheels(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distributions, and the wheels built from them: uv needs half of the CPU time of `build`."""
    out = tmp_path_factory.mktemp("dist")
    build = (Path(sys.executable).with_name("uv"), "build", "--offline", "--no-build-isolation", "--python")
    for directory in DISTRIBUTIONS:
        run(*build, sys.executable, "--out-dir", out, tree / directory, cwd=out)
    return out


def test_all_distributions_have_one_version_and_require_it_of_each_other() -> None:
    for table in map(project_table, DISTRIBUTIONS):
        assert table["version"] == version("torch-kernel-builder")
        extras = table.get("optional-dependencies", {})
        declared = [*table["dependencies"], *(entry for entries in extras.values() for entry in entries)]
        own = [required for required in map(Requirement, declared) if required.name.startswith("torch-kernel-")]
        assert all(str(required.specifier) == f"=={table['version']}" for required in own), own


def test_packages_name_the_commit_of_a_builder_in_a_checkout(tree: Path, tmp_path: Path) -> None:
    project = Path(shutil.copytree(ROOT / "tests/projects/python-only", tmp_path / "project"))
    command = (sys.executable, "-m", "kernel_builder", "build", project, "--no-load", "--out", tmp_path / "out")
    places = (tree, *(tree / library for library in LIBRARIES))
    environment = {"PYTHONPATH": os.pathsep.join(map(str, places)), "KERNEL_BUILDER_CACHE": str(tmp_path / "cache")}

    def recorded() -> object:
        run(*command, cwd=tmp_path, PYTHONDONTWRITEBYTECODE="", **environment)
        metadata = json.loads((tmp_path / "out" / "torch-cuda" / "metadata.json").read_text())
        return metadata["provenance"]["kernel-builder"]

    commit = git(tree, "rev-parse", "HEAD")
    expected = {"version": f"0+g{commit[:12]}", "commit": commit, "dirty": False}
    assert recorded() == expected
    assert recorded() == expected, "also with the bytecode of the first build"
    assert list(tree.rglob("*.pyc"))
    shared = tree / "packages/kernel-format/kernel_format/release.py"
    content = shared.read_text()
    shared.write_text(content + "\n")
    (project / "torch-ext/python_only/__init__.py").open("a").write("\n")
    assert recorded() == {**expected, "dirty": True}, "the formats are a part of the builder"
    shared.write_text(content)


def test_the_wheels_have_every_file_of_their_packages(tree: Path, wheels: Path) -> None:
    """And the kit, which the repository has only as a symbolic link."""
    for directory, name in DISTRIBUTIONS.items():
        git(ROOT, "check-ignore", f"{directory}/build/lib")  # which `pip install` writes
        if directory != ".":
            (wheel,) = wheels.glob(f"torch_{name}-*.whl")
            listed = git(tree, "ls-files", f"{directory}/{name}").split()
            with zipfile.ZipFile(wheel) as archive:
                packed = {path for path in archive.namelist() if ".dist-info/" not in path}
            assert packed == {path.removeprefix(f"{directory}/") for path in listed}
    (wheel,) = wheels.glob("torch_kernel_builder-*.whl")
    link = "kernel_builder/templates/kit"
    assert (tree / link).is_symlink()
    directory = ROOT / "kernels" / "kit"
    kit = {name: (directory / name).read_bytes() for name in git(directory, "ls-files").split()}
    tracked = set(git(tree, "ls-files", "kernel_builder").split()) - {link} | {f"{link}/{name}" for name in kit}
    assert any(name.endswith(".toml") for name in tracked)
    assert any(name.endswith(".json") for name in tracked)
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("kernel_builder/")} == tracked
        assert {name: archive.read(f"{link}/{name}") for name in kit} == kit
        assert not any(entry.external_attr >> 28 == 0xA for entry in archive.infolist()), "no symbolic links"


def test_the_index_accepts_the_distributions(wheels: Path) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(wheels.glob("torch_*")), cwd=wheels)


@pytest.fixture(scope="module")
def command(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`kernel-builder` of an environment in which the wheels are installed."""
    environment = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", ".", cwd=environment)
    python = environment / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*install, *sorted(wheels.glob("*.whl")), cwd=environment)
    # The dependencies are those of this environment. A directory named in a .pth file has its own .pth files ignored,
    # and with them an editable installation of this repository.
    site = next((environment / "lib").glob("python*/site-packages"))
    dependencies = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    (environment / "bin/ninja").symlink_to(find_ninja())
    names = ", ".join(DISTRIBUTIONS.values())
    places = run(python, "-c", f"import {names}; print(*(name.__file__ for name in ({names})))", cwd=environment)
    assert all(Path(place).is_relative_to(site) for place in places.split())
    return environment / "bin" / "kernel-builder"


def test_installed_wheels_have_a_working_command_line(command: Path, tmp_path: Path) -> None:
    assert "init" in run(command, "--help", cwd=tmp_path)
    assert run(command, "--version", cwd=tmp_path).split()[-1] == project_table(".")["version"]
    run(command, "init", "--name", "me/my-kernel", cwd=tmp_path)
    run(command, "check-config", "my-kernel", cwd=tmp_path)
    assert "torch-stable-abi" in run(command, "list-variants", "my-kernel", cwd=tmp_path)
    run(command, "toolchain", "--help", cwd=tmp_path)
    run(command, "hub", "serve", "--help", cwd=tmp_path)
    run(command, "judge", "--help", cwd=tmp_path)


def test_installed_wheels_translate_triton_kernels(command: Path, tmp_path: Path) -> None:
    require_triton()
    project(tmp_path / "scale")
    options = ("--capability", "9.0", "--no-load", "--variant", CUDA, "--keep-generated", "shown")
    run(command, "build", "scale", *options, cwd=tmp_path)
    assert "aot::launch(" in (tmp_path / "shown/scale/aot/scale.cpp").read_text()


def test_installed_wheels_emulate(command: Path, tmp_path: Path) -> None:
    run(command, "init", "--name", "me/my-kernel", cwd=tmp_path)
    assert "test_forward" in run(command, "emulate", "my-kernel", "--", "--collect-only", "-q", cwd=tmp_path)
