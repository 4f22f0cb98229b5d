"""The installed g++ and CUDA toolkit, the choice of a compiler, and the errors if they cannot be used."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder import toml_file
from kernel_builder.backends.cuda import CUDA, nvcc_options, toolkits
from kernel_builder.backends.tools import CudaCompiler
from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import ToolchainError
from tests.support.cli import invoke
from tests.support.files import replace, write_files
from tests.support.files import write_program as program

from .index_server import NVCC

Make = Callable[..., Toolchains]


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
        program(tmp_path / "g++", f'test "$1" = -print-prog-name=as && echo "{assembler}" || exec g++ "$@"')
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
    toolchains: Make, server: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A directory like an installed CUDA 13.0, with the include directory as a symbolic link."""
    toolkit = tmp_path / "cuda"
    program(toolkit / "bin/nvcc", NVCC.decode().removeprefix("#!/bin/sh\n"))
    for name in ("bin/cudafe++", "bin/ptxas", "bin/fatbinary", "bin/nvlink", "nvvm/bin/cicc"):
        program(toolkit / name, "exit 1")
    write_files(toolkit, {"targets/include/cuda.h": "// 1\n"})
    (toolkit / "include").symlink_to("targets/include")
    (toolkit / "lib64").mkdir()
    installed = toolkits.toolkit(toolchains(cuda_home=toolkit, offline=True), Release(13, 0))
    assert (installed.origin, installed.root, installed.version) == ("system", toolkit, "13.0.88")
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    assert toolkits.toolkit(toolchains(offline=True), Release(13, 0)) == installed

    moved = tmp_path / "moved"
    shutil.copytree(toolkit, moved, symlinks=True)
    assert toolkits.toolkit(toolchains(cuda_home=moved), Release(13, 0)).identity == installed.identity

    (toolkit / "include/cuda.h").write_text("// 2\n")
    assert toolkits.toolkit(toolchains(cuda_home=toolkit), Release(13, 0)).identity != installed.identity

    replace(toolkit / "bin/nvcc", "V13.0.88", "V12.6.85")
    assert toolkits.obstacle(toolchains(cuda_home=toolkit, offline=True), Release(12, 6)) is None
    (toolkit / "nvvm/bin/cicc").unlink()
    with pytest.raises(ToolchainError, match="it has no nvvm/bin/cicc"):
        toolkits.toolkit(toolchains(cuda_home=toolkit), Release(13, 0))


@pytest.mark.parametrize(
    ("release", "compiler", "words"),
    [
        ("12.8", None, None),
        ("13.9", None, "needs CUDA 13.9; this builder has 12.8, 13.0"),
        ("12.6", "nvcc", "leave out `--cuda-compiler nvcc`"),
        ("12.6", "nvcc", "--cuda-home"),
        ("13.0", "clang", None),
        ("11.8", "clang", "leave out `--cuda-compiler clang`"),
    ],
)
def test_the_choice_of_a_compiler(
    cache: Path, monkeypatch: pytest.MonkeyPatch, release: str, compiler: CudaCompiler | None, words: str | None
) -> None:
    """The builder's own lock has nvcc from CUDA 13 on, and clang for all releases since 12."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    tools = Toolchains(cache=cache, offline=True, cuda_compiler=compiler)
    obstacle = toolkits.obstacle(tools, Release.parse(release))
    assert obstacle is None if words is None else obstacle and words in f"{obstacle.reason}; {obstacle.hint}"


def test_every_option_of_nvcc_is_allowed_or_refused_with_a_reason() -> None:
    """`nvcc_options.toml` knows every option of the pinned nvcc."""
    nvcc = toolkits.toolkit(Toolchains(), max(filter(None, CUDA.releases()))).root / "bin" / "nvcc"
    words = subprocess.run([nvcc, "--help"], capture_output=True, text=True, check=True).stdout
    options = re.findall(r"^--([\w+-]+).*?\((?:-([\w+-]+))?\)", words, re.M)
    names = {name for pair in options for name in pair if name}
    assert len(names) > 150
    _, refused = nvcc_options()
    data = toml_file.read(Path(toolkits.__file__).with_name("nvcc_options.toml"))
    known = {name for kind in data["allowed"].values() for name in kind} | refused.keys()
    assert names - known == set()
    assert set(data["allowed"]["plain"]) & refused.keys() == set()


@pytest.mark.parametrize("complete", [True, False])
def test_doctor_tells_if_a_machine_is_complete(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    monkeypatch.setenv("KERNEL_BUILDER_CACHE", str(cache))
    for name in ("CXX", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    if not complete:
        monkeypatch.setenv("PATH", str(tmp_path))
    done = invoke("doctor", "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["ready"]) == (1 - complete, {"cpu": complete, "cuda": complete})
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert findings["pinned toolchains"]["value"].startswith("0 of ") or not complete
    missing = {name: finding["hint"] for name, finding in findings.items() if not finding["ok"]}
    assert complete or "apt-get install g++" in missing["g++"]
    assert complete or "git" in missing, "optional requirements are listed too"
