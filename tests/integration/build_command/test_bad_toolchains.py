"""Missing compilers, failing downloads and unusable caches are refused with a hint, and change nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import venv
from pathlib import Path

import pytest

from kernel_builder.config.variant import this_platform
from kernel_builder.toolchain import lock
from tests.integration.build_command.conftest import (
    NewCache,
    Run,
    assert_refused,
    environment,
    untouched,
)
from tests.integration.toolchain.index_server import Fault, IndexServer
from tests.support.places import CPU, CUDA


def test_no_compiler(project: Path, cache: Path, kernel_builder: Run, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--backend", "cpu", PATH=str(empty), CXX="")
        named = kernel_builder(cache, "build", project, "--backend", "cpu", CXX="no-such-g++")
    assert_refused(done, 4, "ToolchainError", where="g++", message="g++ 11 or newer", hint="apt-get install g++")
    assert_refused(named, 4, "ToolchainError", where="no-such-g++", message="no such program", hint="CXX")


@pytest.mark.parametrize("how", ["PATH", "CXX"])
def test_a_compiler_that_is_too_old(project: Path, cache: Path, kernel_builder: Run, tmp_path: Path, how: str) -> None:
    real = shutil.which("g++")
    old = tmp_path / "bin" / "g++"
    old.parent.mkdir()
    old.write_text(f'#!/bin/sh\ncase "$*" in *-dumpfullversion*) echo 9.4.0;; *) exec {real} "$@";; esac\n')
    old.chmod(0o755)
    value = str(old) if how == "CXX" else f"{old.parent}:{os.environ['PATH']}"
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--backend", "cpu", **{how: value})
    assert_refused(done, 4, "ToolchainError", where=str(old), message="is g++ 9.4.0, expected 11", hint="gcc-toolset")


def test_no_ninja(project: Path, cache: Path, tmp_path: Path) -> None:
    """The virtual environment of this test has the builder's dependencies, but not their programs."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    inner = next((tmp_path / "venv" / "lib").glob("*/site-packages"))
    outer = Path(pytest.__file__).parent.parent
    (inner / "outer.pth").write_text(f"import site; site.addsitedir({str(outer)!r})\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("g++", "gcc", "as", "ld", "ar", "nm", "sh"):
        (programs / name).symlink_to(shutil.which(name) or name)
    command = [
        python,
        "-c",
        "from kernel_builder.cli import main; main()",
        "build",
        project,
        "--variant",
        CPU,
        "--json",
    ]
    with untouched(project):
        done = subprocess.run(
            [*command, "--json"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=environment(cache, PATH=str(programs), HOME=str(tmp_path)),
        )
    assert "Traceback" not in done.stderr, done.stderr
    answer = json.loads(done.stdout)
    assert done.returncode == 4
    assert (answer["error"], answer["hint"]) == ("ToolchainError", "pip install ninja")
    assert "no ninja" in answer["message"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--cuda-home", "/nonexistent", "is not a CUDA toolkit: it has no bin/nvcc"),
    ],
)
def test_missing_programs_named_by_options_are_reported(
    project: Path, cache: Path, kernel_builder: Run, option: str, value: str, message: str
) -> None:
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CUDA, option, value)
    assert done.code == 4, done
    assert message in done.answer["message"]
    assert done.answer["hint"]


def test_an_index_that_cannot_be_reached(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/simple/"
    with untouched(project):
        done = kernel_builder(tmp_path / "cold", "build", project, "--variant", CPU, PIP_INDEX_URL=url)
        offline = kernel_builder(tmp_path / "cold", "build", project, "--variant", CPU, "--offline")
    assert_refused(
        done, 4, "FetchError", where=f"at {url}", message="the index cannot be reached", hint="kernel-builder toolchain"
    )
    assert_refused(offline, 4, "FetchError", where="Torch 2.10", message="not in the store", hint="toolchain fetch")
    assert list((tmp_path / "cold" / "toolchains").glob("trees/*torch*")) == []


def test_a_download_that_differs_from_the_lock_is_refused(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    wheel = lock.shipped()["torch-2.10-stable"].platforms[this_platform()][0]
    with IndexServer({wheel.file: b"short"}, {wheel.file: Fault()}, stated={wheel.file: wheel.sha256}) as server:
        arguments = ("build", project, "--variant", CPU)
        with untouched(project):
            truncated = kernel_builder(tmp_path / "cold", *arguments, PIP_INDEX_URL=server.url)
            server.stated.clear()
            altered = kernel_builder(tmp_path / "cold", *arguments, PIP_INDEX_URL=server.url)
    assert_refused(truncated, 4, "FetchError", where=wheel.file, message="truncated", hint="another index")
    assert_refused(altered, 4, "FetchError", where=wheel.file, message=f"expected {wheel.sha256}", hint="mirrors")


def test_no_permission_to_write_the_cache(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with untouched(project):
        done = kernel_builder(tmp_path / "file" / "cache", "build", project, "--variant", CPU)
    assert_refused(done, 4, "StoreError", where="file", message="cannot be written", hint="KERNEL_BUILDER_CACHE")


def test_a_cache_path_with_white_space_is_refused(project: Path, kernel_builder: Run, new_cache: NewCache) -> None:
    cache = new_cache("my cache, mine")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    assert_refused(done, 4, "StoreError", where=str(cache), message="white space", hint="KERNEL_BUILDER_CACHE")
