"""Missing compilers, failing downloads and unusable caches are refused with a hint, and change nothing."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.integration.build_command.conftest import (
    NewCache,
    Run,
    assert_refused,
    untouched,
)
from tests.support.places import CPU


def test_no_compiler(project: Path, cache: Path, kernel_builder: Run, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--backend", "cpu", PATH=str(empty), CXX="")
        named = kernel_builder(cache, "build", project, "--backend", "cpu", CXX="no-such-g++")
    assert_refused(done, 4, "ToolchainError", where="g++", message="g++ 11 or newer", hint="apt-get install g++")
    assert_refused(named, 4, "ToolchainError", where="no-such-g++", message="no such program", hint="CXX")


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


def test_a_cache_path_with_white_space_is_refused(project: Path, kernel_builder: Run, new_cache: NewCache) -> None:
    cache = new_cache("my cache, mine")
    with untouched(project):
        done = kernel_builder(cache, "build", project, "--variant", CPU)
    assert_refused(done, 4, "StoreError", where=str(cache), message="white space", hint="KERNEL_BUILDER_CACHE")
