"""`kernel-builder init` creates a project that builds and passes its own tests; on an error it changes no file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kernels._rust import Build

from kernel_builder import scaffold
from kernel_builder.cli import main
from kernel_builder.config import project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Release, this_platform


def init(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["init", *map(str, args)])


def tree(directory: Path) -> dict[str, str]:
    """Every path below the directory, and the content of every file."""
    return {
        path.relative_to(directory).as_posix(): path.read_text() if path.is_file() else ""
        for path in directory.rglob("*")
    }


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("args", "backends"),
    [
        ([], ("cpu", "cuda")),
        (["--backends", "cuda"], ("cuda",)),
        (["--backends", "cuda", "cpu"], ("cpu", "cuda")),
        (["--backends", "cuda", "cpu", "--license", "mit"], ("cpu", "cuda")),
        (["--backends", "cpu", "--backends", "cuda"], ("cpu", "cuda")),
        (["--backends=cpu"], ("cpu",)),
        (["--backends", "cpu cuda"], ("cpu", "cuda")),
    ],
)
def test_the_project_is_valid(args: list[str], backends: tuple[str, ...]) -> None:
    result = init("--name", "my-org/fast-relu2", *args)
    assert result.exit_code == 0, result.output
    assert "kernel-builder build fast-relu2" in result.output
    read = read_project(Path("fast-relu2"))
    assert (read.name, read.hub_repo_id, read.backends) == ("fast-relu2", "my-org/fast-relu2", backends)
    assert read.license == ("mit" if "mit" in args else "apache-2.0")
    assert [kernel.backend for kernel in read.kernels] == list(backends)
    assert isinstance(read.framework, project.TorchFramework)
    assert read.framework.stable_abi == dict.fromkeys(backends, Release(2, 10))
    assert [str(backend) for backend in Build.open(Path("fast-relu2")).general.backends] == list(backends)
    assert {"CARD.md", "example.py", "benchmarks/benchmark.py", "tests/test_relu.py"} <= set(tree(Path("fast-relu2")))
    assert "$" not in "".join(tree(Path("fast-relu2")).values())
    for file in Path("fast-relu2").rglob("*.py"):
        compile(file.read_text(), file, "exec")


def test_it_builds_and_passes_its_own_tests() -> None:
    assert init("a project", "--name", "org/my-relu", "--backends", "cpu").exit_code == 0
    kernel_builder = [sys.executable, "-c", "from kernel_builder.cli import main; main()"]
    variant = f"torch-stable-abi210-cpu-{this_platform()}"
    subprocess.run([*kernel_builder, "build", "a project", "--variant", variant], check=True)
    assert Path("a project/build", variant, "metadata.json").is_file()
    for command in (["-m", "pytest", "-q", "a project/tests"], ["a project/example.py"]):
        subprocess.run([sys.executable, *command], check=True)
    measured = CliRunner().invoke(
        main, ["benchmark", "a project", "--backend", "cpu", "--against", "eager", "--rounds", "3"]
    )
    assert measured.exit_code == 0, measured.output
    assert "relu, forward, bfloat16" in measured.output and "relu, backward, bfloat16" in measured.output


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["--name", "my-relu"], "'my-relu' is not the name of a Hub repository", "org/my-kernel"),
        (["--name", "org/My_Relu"], "'My_Relu' is not a kernel's name", "org/my-kernel"),
        (["--name", "org/../x"], "'org/../x' is not the name of a Hub repository", "org/my-kernel"),
        (["--name", "org/ab", "--backends", "cpu", "rocm"], "no template for the backend 'rocm'", "start with cpu"),
        (["--name", "org/ab", "--backends", "cdua"], "'cdua' is not a backend", "did you mean cuda?"),
        (["--name", "org/ab", "--backends", ""], "names no backend", "choose from cpu, cuda"),
        (["--name", "org/ab", "--license", 'mit"'], "is not an SPDX name", "apache-2.0"),
    ],
)
def test_bad_arguments(args: list[str], message: str, hint: str, tmp_path: Path) -> None:
    result = init(*args)
    assert result.exit_code == 2
    assert message in result.output
    assert hint in result.output
    assert tree(tmp_path) == {}


def test_existing_files_are_kept(tmp_path: Path) -> None:
    Path("here").mkdir()
    Path("here/CARD.md").write_text("mine")
    Path("here/notes.txt").write_text("mine too")
    before = tree(tmp_path)
    result = init("here", "--name", "org/ab")
    assert result.exit_code == 2
    assert "here: has CARD.md already" in result.output
    assert tree(tmp_path) == before

    assert init("here", "--name", "org/ab", "--overwrite").exit_code == 0
    after = tree(tmp_path)
    assert after["here/CARD.md"] != "mine"
    assert after["here/notes.txt"] == "mine too"
    assert not [path for path in after if "kernel-builder" in path]


def test_an_error_leaves_everything_as_it_was(tmp_path: Path) -> None:
    Path("here").mkdir()
    Path("here/CARD.md").write_text("mine")
    Path("here/torch-ext").write_text("a file where a directory belongs, met after other files are written")
    before = tree(tmp_path)
    result = init("here", "--name", "org/ab", "--overwrite")
    assert result.exit_code == 2
    assert "torch-ext" in result.output
    assert tree(tmp_path) == before


def test_a_directory_is_never_overwritten(tmp_path: Path) -> None:
    Path("here/CARD.md").mkdir(parents=True)
    Path("here/CARD.md/thesis.txt").write_text("irreplaceable")
    before = tree(tmp_path)
    result = init("here", "--name", "org/ab", "--overwrite")
    assert result.exit_code == 2
    assert "here/CARD.md: is a directory" in result.output
    assert tree(tmp_path) == before


def test_there_is_a_template_for_each_backend_that_is_built() -> None:
    from kernel_builder.config.offered import COMPILED_BACKENDS

    assert set(scaffold.backends()) == set(COMPILED_BACKENDS)
