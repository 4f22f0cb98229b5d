"""The distribution: its version comes from the tag, the wheel has every file, the installed command line works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import kernel_builder
from tests.support.places import ROOT

TRACKED = (
    ".gitattributes",
    ".git_archival.txt",
    "LICENSE",
    "README.md",
    "kernel_builder",
    "kernels/kit",
    "packages",
    "pyproject.toml",
)
# Directory of a distribution -> its import package, and the prefix of its tags.
DISTRIBUTIONS = {
    ".": ("kernel_builder", "v"),
    "packages/kernel-hub": ("kernel_hub", "kernel-hub-v"),
    "packages/kernel-judge": ("kernel_judge", "kernel-judge-v"),
}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    # Only what an installation has: no source tree on the import path.
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def git(tree: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false")
    return run("git", *identity, *arguments, cwd=tree)


def scm_version(tree: Path, directory: str = ".") -> str:
    return run(sys.executable, "-m", "setuptools_scm", cwd=tree / directory).strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the distribution is made of, in a repository of their own without tags."""
    tree = tmp_path_factory.mktemp("tree")
    for name in TRACKED:
        source, target = ROOT / name, tree / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "first")
    return tree


@pytest.fixture(scope="module")
def distributions(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distributions, and the wheels built from them."""
    out = tmp_path_factory.mktemp("dist")
    for directory in DISTRIBUTIONS:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree / directory, cwd=out)
    return out


@pytest.mark.parametrize("directory", DISTRIBUTIONS)
def test_the_version_is_that_of_the_tag(tree: Path, tmp_path: Path, directory: str) -> None:
    _, prefix = DISTRIBUTIONS[directory]
    clone = tmp_path / "clone"
    git(tree, "clone", "--quiet", str(tree), str(clone))
    assert Version(scm_version(clone, directory)).is_devrelease, "there are no tags"
    git(clone, "tag", f"{prefix}1.2.0")
    assert scm_version(clone, directory) == "1.2.0"
    for other, (_, others) in DISTRIBUTIONS.items():
        if others != prefix:
            assert Version(scm_version(clone, other)).is_devrelease, "each distribution has tags of its own"
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "second")
    after = Version(scm_version(clone, directory))
    assert after > Version("1.2.0")
    assert after.is_devrelease
    shutil.rmtree(clone / ".git")
    assert Version(scm_version(clone, directory)).is_devrelease, "a copy without git still has a version"


def test_an_archive_of_a_tag_has_its_version(tree: Path, tmp_path: Path) -> None:
    """GitHub makes such archives, which have no .git."""
    clone, archive = tmp_path / "clone", tmp_path / "archive"
    git(tree, "clone", "--quiet", str(tree), str(clone))
    git(clone, "tag", "v1.2.0")
    git(clone, "archive", "--output", str(tmp_path / "archive.tar"), "HEAD")
    archive.mkdir()
    shutil.unpack_archive(tmp_path / "archive.tar", archive)
    assert scm_version(archive) == "1.2.0"


def test_the_version_is_known_without_an_installation(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "kernel_builder" / "__init__.py", tmp_path / "kernel_builder.py")
    show = "import kernel_builder; print(kernel_builder.__version__)"
    command = [sys.executable, "-S", "-c", show]  # -S: no installed distributions, as in a Nix build
    assert run(*command, cwd=tmp_path).strip() == "0+unknown"
    assert kernel_builder.__version__ == version("torch-kernel-builder")


def test_packages_name_the_commit_of_a_builder_in_a_checkout(tree: Path, tmp_path: Path) -> None:
    project = Path(shutil.copytree(ROOT / "tests/projects/python-only", tmp_path / "project"))
    command = (sys.executable, "-m", "kernel_builder", "build", project, "--no-load", "--out", tmp_path / "out")
    environment = {"PYTHONPATH": str(tree), "KERNEL_BUILDER_CACHE": str(tmp_path / "cache")}
    for _ in range(2):  # the second time with the bytecode of the first
        run(*command, cwd=tmp_path, PYTHONDONTWRITEBYTECODE="", **environment)
        metadata = json.loads((tmp_path / "out" / "torch-cuda" / "metadata.json").read_text())
        commit = git(tree, "rev-parse", "HEAD").strip()
        assert metadata["provenance"]["kernel-builder"] == {
            "version": f"0+g{commit[:12]}",
            "commit": commit,
            "dirty": False,
        }
    assert list(tree.rglob("*.pyc"))


def test_importlib_metadata_is_imported_only_when_the_version_is_read() -> None:
    show = "import sys, kernel_builder.cli; print('importlib.metadata' in sys.modules)"
    assert run(sys.executable, "-c", show, cwd=ROOT, PYTHONPATH=str(ROOT)).strip() == "False"


def test_the_wheel_has_every_file_of_the_package(tree: Path, distributions: Path) -> None:
    """And the kit, which the repository has only as a symbolic link."""
    (wheel,) = distributions.glob("torch_kernel_builder-*.whl")
    link = "kernel_builder/templates/kit"
    assert (tree / link).is_symlink()
    kit = {path.name: path.read_bytes() for path in (ROOT / "kernels" / "kit").iterdir() if path.is_file()}
    tracked = set(git(tree, "ls-files", "kernel_builder").split()) - {link} | {f"{link}/{name}" for name in kit}
    assert any(name.endswith(".toml") for name in tracked)
    assert any(name.endswith(".json") for name in tracked)
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("kernel_builder/")} == tracked
        assert {name: archive.read(f"{link}/{name}") for name in kit} == kit
        assert archive.read("kernel_builder/templates/init/common/benchmarks/workload.py") == kit["workload.py"]
        assert not any(entry.external_attr >> 28 == 0xA for entry in archive.infolist()), "no symbolic links"


@pytest.mark.parametrize("directory", [name for name in DISTRIBUTIONS if name != "."])
def test_the_wheels_of_the_packages_have_their_files(tree: Path, distributions: Path, directory: str) -> None:
    name, _ = DISTRIBUTIONS[directory]
    (wheel,) = distributions.glob(f"torch_{name}-*.whl")
    tracked = {path.removeprefix(f"{directory}/") for path in git(tree, "ls-files", f"{directory}/{name}").split()}
    with zipfile.ZipFile(wheel) as archive:
        assert {path for path in archive.namelist() if ".dist-info/" not in path} == tracked


def test_installed_wheels_have_a_working_command_line(distributions: Path, tmp_path: Path) -> None:
    wheels = sorted(distributions.glob("*.whl"))
    (builder,) = distributions.glob("torch_kernel_builder-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*install, *wheels, cwd=tmp_path)
    # The dependencies are those of this environment. A directory named in a .pth file has its own .pth files ignored,
    # and with them an editable installation of this repository.
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    dependencies = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    where = run(python, "-c", "import kernel_builder; print(kernel_builder.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(site)
    show = "import sys, kernel_builder; print(kernel_builder.__version__, 'importlib.metadata' in sys.modules)"
    assert run(python, "-c", show, cwd=tmp_path).split() == [builder.name.split("-")[1], "False"]

    command = tmp_path / "venv" / "bin" / "kernel-builder"
    assert "init" in run(command, "--help", cwd=tmp_path)
    shown = run(command, "--version", cwd=tmp_path)
    assert shown.split()[-1] == builder.name.split("-")[1]
    run(command, "init", "--name", "me/my-kernel", cwd=tmp_path)
    run(command, "check-config", "my-kernel", cwd=tmp_path)
    run(command, "init", "--name", "me/on-kit", "--kit", cwd=tmp_path)
    run(command, "check-config", "on-kit", cwd=tmp_path)
    assert "torch-stable-abi" in run(command, "list-variants", "my-kernel", cwd=tmp_path)
    run(command, "toolchain", "--help", cwd=tmp_path)
    run(command, "hub", "serve", "--help", cwd=tmp_path)
    run(command, "judge", "--help", cwd=tmp_path)


def test_a_release_is_published_by_its_tag_alone() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/publish-package.yml").read_text())
    assert workflow[True] == {"push": {"tags": [f"{prefix}*" for _, prefix in DISTRIBUTIONS.values()]}}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    checkout = build["steps"][0]["with"]
    assert checkout["fetch-depth"] == 0, "the version is counted from the tags"
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}, "trusted publishing: no token is stored"
    assert "secrets." not in (ROOT / ".github/workflows/publish-package.yml").read_text()
    assert any(re.match(r"pypa/gh-action-pypi-publish@[0-9a-f]{40}$", s.get("uses", "")) for s in publish["steps"])
