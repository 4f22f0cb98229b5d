"""The installed g++ and CUDA toolkit, and the errors if they cannot be used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import ToolchainError

from .index_server import NVCC

Make = Callable[..., Toolchains]


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A directory like an installed CUDA 13.0, with the include directory as a symbolic link."""
    root = tmp_path / "cuda"
    program(root / "bin/nvcc", NVCC.decode().removeprefix("#!/bin/sh\n"))
    for name in ("bin/cudafe++", "bin/ptxas", "bin/fatbinary", "bin/nvlink", "nvvm/bin/cicc"):
        program(root / name, "exit 1")
    (root / "targets/include").mkdir(parents=True)
    (root / "targets/include/cuda.h").write_text("// 1\n")
    (root / "include").symlink_to("targets/include")
    (root / "lib64").mkdir()
    return root


def test_a_compiler_is_identified_by_its_content_not_its_path(
    toolchains: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    real = toolchains().host()
    assert real.path == Path(shutil.which("g++") or "")
    assert int(real.version.split(".")[0]) >= 11
    elsewhere = tmp_path / "tool chain/c++-own"
    program(elsewhere, f'exec {real.path} "$@"')
    monkeypatch.setenv("CXX", str(elsewhere))
    wrapped = toolchains().host()
    assert wrapped.path == elsewhere
    assert wrapped.identity == real.identity


def test_the_identity_changes_with_the_assembler_not_with_its_path(
    toolchains: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))

    def identity(assembler: Path) -> str:
        script = f'test "$1" = -print-prog-name=as && echo "{assembler}" || exec g++ "$@"'
        program(tmp_path / "g++", script)
        return toolchains().host().identity

    before = identity(program(tmp_path / "as", "echo 1"))
    assert identity(program(tmp_path / "elsewhere/as", "echo 1")) == before
    assert identity(program(tmp_path / "as", "echo 2")) != before


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('case "$1" in --version) echo "g++ (GCC) 10.2.1";; -dumpfullversion) echo 10.2.1;; esac', "g\\+\\+ 10.2.1"),
        ('case "$1" in -dM) echo "#define __clang__ 1";; *) echo "clang version 19.1.7";; esac', "not g\\+\\+"),
        ("exit 1", "not g\\+\\+"),
    ],
)
def test_a_compiler_that_cannot_be_used(
    toolchains: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path / "bin/c++", script)))
    with pytest.raises(ToolchainError, match=message) as caught:
        toolchains().host()
    assert "apt-get install g++" in (caught.value.hint or "")


def test_an_installed_toolkit_replaces_the_pinned_one_of_its_release(
    toolchains: Make, toolkit: Path, server: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = toolkits.toolkit(toolchains(cuda_home=toolkit, offline=True), Release(13, 0))
    assert (installed.origin, installed.root, installed.version) == ("system", toolkit, "13.0.88")
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    assert toolkits.toolkit(toolchains(offline=True), Release(13, 0)) == installed

    moved = tmp_path / "moved"
    shutil.copytree(toolkit, moved, symlinks=True)
    assert toolkits.toolkit(toolchains(cuda_home=moved), Release(13, 0)).identity == installed.identity

    (toolkit / "include/cuda.h").write_text("// 2\n")
    assert toolkits.toolkit(toolchains(cuda_home=toolkit), Release(13, 0)).identity != installed.identity


def test_an_incomplete_toolkit_is_rejected(toolchains: Make, toolkit: Path) -> None:
    (toolkit / "nvvm/bin/cicc").unlink()
    with pytest.raises(ToolchainError, match="it has no nvvm/bin/cicc"):
        toolkits.toolkit(toolchains(cuda_home=toolkit), Release(13, 0))


def test_cuda_obstacle_explains_why_a_release_cannot_be_used(toolchains: Make, toolkit: Path) -> None:
    tools = toolchains(offline=True)
    assert toolkits.obstacle(tools, Release(13, 0)) is None
    old = toolkits.obstacle(tools, Release(12, 6))
    assert old is not None
    assert "--cuda-home" in old.hint
    nvcc = toolkit / "bin/nvcc"
    nvcc.write_text(nvcc.read_text().replace("V13.0.88", "V12.6.85"))
    assert toolkits.obstacle(toolchains(cuda_home=toolkit), Release(12, 6)) is None
    with pytest.raises(ToolchainError, match=r"CUDA 12\.6"):
        toolkits.toolkit(tools, Release(12, 6))
