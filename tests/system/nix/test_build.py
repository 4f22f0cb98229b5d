"""`nix build` gives the bytes of `kernel-builder build`, rebuilds changed packages, and fetches pinned files only."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_format.tree_digest import hash_tree
from tests.support.files import append, replace, write_files
from tests.support.newest import NEWEST, full_abi
from tests.support.places import CPU, CUDA, LIBRARIES, PROJECTS, ROOT, SOURCES
from tests.support.running_hub import running_hub
from tests.support.torch_process import output_with_torch
from tests.system.nix.conftest import Nix

KernelFlake = Callable[[Path], Path]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TESTS_CONFIGURATION = """
def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: the subset that checks a build within a few seconds")
"""


@pytest.fixture
def scale(kernel_flake: KernelFlake, tmp_path: Path) -> Path:
    """Make a flake of `stable-scale` with tests and a Hub repository."""
    project = Path(shutil.copytree(PROJECTS / "stable-scale", tmp_path / "original" / "stable-scale"))
    config = (project / "build.toml").read_text()
    config = config.replace("[torch]", '[general.hub]\nrepo-id = "kernels-community/stable-scale"\n\n[torch]')
    files = {
        "build.toml": config,
        "CARD.md": "# stable-scale\n",
        "tests/conftest.py": TESTS_CONFIGURATION,
        "tests/test_scale.py": SOURCES["nix_tests"],
    }
    return kernel_flake(write_files(project, files))


def built_by_the_command_line(flake: Path, project: Path, out: Path, *arguments: str) -> dict[str, str]:
    """Build with the flake's copy of the builder and the user's cache; return variant -> digest of its package."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(flake / library) for library in LIBRARIES),
        "PYTHONPYCACHEPREFIX": str(flake.with_name("bytecode")),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "kernel_builder", "build", str(project), "--out", str(out), "--no-load"]
    subprocess.run([*command, *arguments], cwd=flake, check=True, env=environment)
    return digests(out)


def digests(bundle: Path) -> dict[str, str]:
    return {package.name: hash_tree(package).value for package in bundle.iterdir()}


@pytest.mark.nightly  # `test_a_change_rebuilds_only_its_packages` compares the bytes of a smaller project
def test_a_kernel_has_the_bytes_of_the_command_line_build(nix: Nix, flake: Path, tmp_path: Path) -> None:
    """A kernel of this repository, which uses the kit."""
    expected = built_by_the_command_line(flake, flake / "kernels/geglu", tmp_path / "out", "--variant", CPU)
    assert digests(nix.build(flake, f"geglu-{CPU}")) == expected


def test_cpu_tests_pass_on_the_built_packages(nix: Nix, scale: Path) -> None:
    check = f".#checks.{os.uname().machine}-linux.stable-scale-cpu-tests"
    done = nix.run(scale, "build", check, "--no-link", "--print-build-logs")
    assert "2 passed" in done.stderr
    replace(scale / "tests/test_scale.py", "[0, 0, 0]", "[1, 1, 1]")
    done = nix.run(scale, "build", check, "--no-link", "--print-build-logs", ok=False)
    assert "1 failed, 1 passed" in done.stderr
    (scale / "tests/test_scale.py").write_text("import pytest\n\npytest.skip('no GPU', allow_module_level=True)\n")
    done = nix.run(scale, "build", check, "--no-link", "--print-build-logs", ok=False)
    assert "every test of stable-scale was skipped" in done.stderr


def test_a_change_rebuilds_only_its_packages(nix: Nix, flake: Path, scale: Path, tmp_path: Path) -> None:
    attribute = f"redistributable.{CPU}"
    nix.build(scale, attribute)
    (scale / "CARD.md").write_text("# changed\n")
    assert nix.to_build(scale, attribute) == set()
    append(scale / "scale" / "scale_cpu.cpp", "\nint changed() { return 1; }\n")
    assert nix.to_build(scale, attribute) == {f"stable-scale-{CPU}", "stable-scale"}
    expected = built_by_the_command_line(flake, scale, tmp_path / "out", "--variant", CPU)
    assert digests(nix.build(scale, attribute)) == expected


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("python-only", "torch-cpu"),
        ("stable-scale", CUDA),
        # clang: another toolkit
        pytest.param("stable-scale", CUDA.replace("cu130", "cu126"), marks=pytest.mark.nightly),
        pytest.param("full-scale", full_abi(NEWEST, "cpu"), marks=pytest.mark.nightly),  # another Torch
    ],
)
def test_a_project_has_the_bytes_of_the_command_line_build(
    nix: Nix, flake: Path, kernel_flake: KernelFlake, tmp_path: Path, name: str, variant: str
) -> None:
    project = kernel_flake(PROJECTS / name)
    expected = built_by_the_command_line(flake, project, tmp_path / "out", "--variant", variant)
    assert digests(nix.build(project, f"redistributable.{variant}")) == expected


def test_the_flake_has_blocks_and_the_kit_for_new_projects(nix: Nix, flake: Path, tmp_path: Path) -> None:
    project = tmp_path / "new"
    nix.run(flake, "run", ".#kernel-builder", "--", "init", str(project), "--name", "org/new")
    assert (project / "kit/rows.h").read_bytes() == (ROOT / "kernels/kit/rows.h").read_bytes()
    assert [path.name for path in nix.build(flake, "blocks-torch-cpu").iterdir()] == ["torch-cpu"]


def test_another_hash_in_the_lock_is_refused(nix: Nix, flake: Path, tmp_path: Path) -> None:
    other = tmp_path / "repository"
    shutil.copytree(flake, other, symlinks=True)
    lock = other / "kernel_builder/toolchain/lock.json"
    text = lock.read_text()
    at = text.index('"fetched": "', text.index('"torch-2.10-stable"')) + len('"fetched": "')
    lock.write_text(f"{text[:at]}{'0' * 64}{text[at + 64 :]}")
    done = nix.run(other, "build", f".#geglu-{CPU}", "--no-link", ok=False)
    assert "hash mismatch in fixed-output derivation" in done.stderr
    assert "torch-2.10" in done.stderr


def test_a_compile_error_is_reported_as_by_the_command_line(nix: Nix, scale: Path) -> None:
    append(scale / "scale" / "scale_cpu.cpp", "\n#error broken on purpose\n")
    done = nix.run(scale, "build", f".#redistributable.{CPU}", "--no-link", "--print-build-logs", ok=False)
    assert "scale/scale_cpu.cpp: the compiler failed" in done.stderr
    assert "broken on purpose" in done.stderr


def test_a_build_in_a_shell_gives_the_same_bytes_without_the_network(nix: Nix, scale: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["kernel-builder", "build", ".", "--variant", CPU, "--offline", "--no-load", "--out", str(out)]
    empty = Nix(nix.root, {**nix.environment, "KERNEL_BUILDER_CACHE": str(tmp_path / "cache")})
    line = f"command -v kernel-builder; exec {shlex.join(command)}"
    done = empty.run(scale, "develop", f".#{CPU}", "--command", "bash", "-c", line)
    assert done.stdout.startswith(f"{nix.root}/store/"), done.stdout
    (shared,) = (out / CPU).glob("*.abi3.so")
    assert shared.read_bytes() == (nix.build(scale, f"redistributable.{CPU}") / CPU / shared.name).read_bytes()


def test_ci_tests_and_test_shells_have_the_kernel(nix: Nix, scale: Path) -> None:
    done = nix.run(scale, "run", f".#ciTests.{CPU}")
    assert "1 passed, 1 deselected" in done.stdout
    built = nix.build(scale, f"redistributable.{CPU}") / CPU
    load = (
        "import kernels, stable_scale;"
        "kernel = kernels.get_kernel('kernels-community/stable-scale', version=1, backend='cpu');"
        "print(stable_scale.__file__, kernel.__file__)"
    )
    done = nix.run(scale, "develop", f".#testShells.{CPU}", "--command", "python3", "-c", load)
    assert done.stdout.split() == [str(built / "__init__.py")] * 2  # by its Python name it is the same module


def test_a_build_is_published_and_loaded_by_the_client(nix: Nix, scale: Path, tmp_path: Path) -> None:
    config = scale / "build.toml"
    config.write_text(config.read_text().partition("[kernel.scale_cuda]")[0].replace('["cpu", "cuda"]', '["cpu"]'))
    with running_hub(tmp_path, "--trust", "kernels-community") as hub:
        client = {name: hub.environment[name] for name in ("HF_ENDPOINT", "HF_HOME", "HF_TOKEN")}
        done = Nix(nix.root, {**nix.environment, **client}).run(scale, "run", ".#build-and-upload")
        assert {path.name for path in (scale / "build").iterdir()} == {CPU}
        assert f"published  {CPU}" in done.stdout
        output_with_torch(SOURCES["load_of_nix"], **hub.environment)
