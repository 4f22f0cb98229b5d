"""`kernel-builder init` creates a project that builds and passes its own tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from kernel_builder import toml_file
from kernel_builder.cli import init_command
from kernel_builder.config import project
from kernel_builder.config.project_files import read_project
from kernel_builder.config.variant import Release, this_platform
from tests.support import public_parser
from tests.support.cli import expect, invoke
from tests.support.files import write_files
from tests.support.places import ROOT
from tests.support.torch_process import output_with_torch, run_with_torch

KIT = ROOT / "kernels" / "kit"
init = partial(invoke, "init")


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
        (["--backends", "cuda,cpu", "--license", "mit"], ("cpu", "cuda")),
    ],
)
def test_the_project_is_valid(args: list[str], backends: tuple[str, ...]) -> None:
    expect(0, "kernel-builder build fast-relu2", "init", "--name", "my-org/fast-relu2", *args)
    read = read_project(Path("fast-relu2"))
    assert (read.name, read.hub_repo_id) == ("fast-relu2", "my-org/fast-relu2")
    assert tuple(map(str, read.backends)) == backends
    assert read.license == ("mit" if "mit" in args else "apache-2.0")
    assert [kernel.backend.name for kernel in read.kernels] == list(backends)
    assert isinstance(read.framework, project.TorchFramework)
    assert read.framework.stable_abi == dict.fromkeys(read.backends, Release(2, 10))
    assert public_parser.read(Path("fast-relu2/build.toml").read_text(), Path())
    files = {"CARD.md", "README.md", ".gitignore", "example.py", "benchmarks/benchmark.py", "tests/test_relu.py"}
    assert files <= set(tree(Path("fast-relu2")))
    readme = Path("fast-relu2/README.md").read_text()
    assert all(f"kernel-builder {step} ." in readme for step in ("build", "benchmark", "check-builds", "upload"))
    assert [f"fast_relu2_{backend}/" in readme for backend in ("cpu", "cuda")] == [
        b in backends for b in ("cpu", "cuda")
    ]
    assert "${" not in "".join(tree(Path("fast-relu2")).values())
    kit = {path.name: path.read_bytes() for path in Path("fast-relu2/kit").iterdir()}
    assert ("launch.cuh" in kit, "cpu.h" in kit) == ("cuda" in backends, "cpu" in backends)
    assert kit == {name: (KIT / name).read_bytes() for name in kit}
    for file in Path("fast-relu2").rglob("*.py"):
        compile(file.read_text(), file, "exec")


def test_missing_distributions_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install" not in init("me/first").output
    monkeypatch.setattr(init_command, "find_spec", lambda name: None)
    assert "pip install torch pytest" in init("me/second").output
    assert "pip install torch pytest" in Path("second/README.md").read_text()


def test_an_operator_is_named_once() -> None:
    assert init("me/gates", "--op", "swi_glu").exit_code == 0
    files = tree(Path("gates"))
    assert {"gates/swi_glu.h", "gates_cpu/swi_glu.cpp", "gates_cuda/swi_glu.cu", "tests/test_swi_glu.py"} <= set(files)
    assert not [path for path, content in files.items() if "relu" in f"{path}{content}".lower()]
    assert sum("Not written yet:" in content for content in files.values()) == 4, "card, op, layer, and its test"
    for content in (files["torch-ext/gates/__init__.py"], files["torch-ext/torch_binding.cpp"], files["CARD.md"]):
        assert "swi_glu" in content
    assert "class SwiGlu(" in files["torch-ext/gates/layers.py"]


def test_a_project_with_triton_kernels_builds_as_a_python_package() -> None:
    assert init("me/my-gate", "--language", "triton", "--op", "gate").exit_code == 0
    files = tree(Path("my-gate"))
    expected = {"aot.toml", "CARD.md", "README.md", "torch-ext/my_gate/kernels.py", "torch-ext/my_gate/layers.py"}
    assert expected | {"tests/test_gate.py", "benchmarks/workload.py", "example.py", ".gitignore"} <= set(files)
    assert not [path for path, content in files.items() if path.endswith((".h", ".cpp")) or "relu" in content.lower()]
    assert "${" not in "".join(files.values())
    assert isinstance(read_project(Path("my-gate")).framework, project.TorchNoarch)
    assert public_parser.read(files["build.toml"], Path())
    assert invoke("build", "my-gate", "--variant", "torch-cuda").exit_code == 0
    assert Path("my-gate/build/torch-cuda/kernels.py").is_file()
    output_with_torch("import pytest, sys; sys.exit(pytest.main(['-q', 'my-gate/tests']))")
    if not torch.cuda.is_available():
        example = run_with_torch("import runpy; runpy.run_path('my-gate/example.py', run_name='__main__')")
        message = f"this kernel is for cuda, and Torch {torch.__version__} finds no such device here\n"
        assert (example.returncode, example.stderr) == (1, message)


@pytest.mark.slow
def test_the_device_code_of_a_new_project_compiles() -> None:
    """`tests/integration/docs/test_first_kernel.py` builds, tests and measures a project for the CPU."""
    assert init("a project", "--name", "org/my-relu").exit_code == 0
    variant = f"torch-stable-abi210-cu130-{this_platform()}"
    assert invoke("build", "a project", "--variant", variant, "--capability", "9.0").exit_code == 0
    assert Path("a project/build", variant, "metadata.json").is_file()


@pytest.mark.parametrize(
    ("args", "message", "hint"), toml_file.read(Path(__file__).with_name("bad_arguments.toml"))["refused"]
)
def test_bad_arguments(args: list[str], message: str, hint: str, tmp_path: Path) -> None:
    result = expect(2, message, "init", *(argument.replace("ROOT", str(ROOT)) for argument in args))
    assert hint in result.output
    assert tree(tmp_path) == {}


@pytest.mark.attack
def test_existing_files_are_kept(tmp_path: Path) -> None:
    write_files(Path("here"), {"CARD.md": "mine", "notes.txt": "mine too"})
    before = tree(tmp_path)
    expect(2, "here: the directory already has CARD.md", "init", "here", "--name", "org/ab")
    assert tree(tmp_path) == before

    assert init("here", "--name", "org/ab", "--overwrite").exit_code == 0
    after = tree(tmp_path)
    assert after["here/CARD.md"] != "mine"
    assert after["here/notes.txt"] == "mine too"
    assert not [path for path in after if "kernel-builder" in path]
    Path("here/kit").rename("outside")
    Path("here/kit").symlink_to(tmp_path / "outside")
    expect(2, "here/kit: is a symbolic link", "init", "here", "--name", "org/ab", "--overwrite")


def test_a_project_with_links_is_copied_with_their_targets(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    expect(0, "", "init", "--from", ROOT / "kernels" / "rmsnorm", target)
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert invoke("check-config", target).exit_code == 0
