"""Missing compilers, failing downloads and unusable caches are refused with a hint, and change nothing."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import FetchError, StoreError, ToolchainError
from tests.integration.build_command.conftest import FOR_CPU, NewCache, Run


def test_no_compiler(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    missing = {"where": "g++", "message": "g++ 11 or newer", "hint": "apt-get install g++"}
    kernel_builder.refuse(project, *FOR_CPU, error=ToolchainError, **missing, PATH=str(tmp_path / "bin"), CXX="")
    named = {"where": "no-such-g++", "message": "no such program", "hint": "CXX"}
    kernel_builder.refuse(project, *FOR_CPU, error=ToolchainError, **named, CXX="no-such-g++")


def test_an_index_that_cannot_be_reached(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/simple/"
    cold = tmp_path / "cold"
    expected = {"where": f"at {url}", "message": "the index cannot be reached", "hint": "kernel-builder toolchain"}
    kernel_builder.refuse(project, *FOR_CPU, cache=cold, error=FetchError, **expected, PIP_INDEX_URL=url)
    expected = {"where": "Torch 2.10", "message": "not in the store", "hint": "toolchain fetch"}
    kernel_builder.refuse(project, *FOR_CPU, "--offline", cache=cold, error=FetchError, **expected)
    assert list((cold / "toolchains").glob("trees/*torch*")) == []


@pytest.mark.attack
def test_a_header_that_was_changed_after_its_download(project: Path, kernel_builder: Run, tmp_path: Path) -> None:
    """The keys of steps name the download: objects of other headers would stay in the cache."""
    downloaded = Toolchains().torch(Release(2, 10), "stable").root
    cache = tmp_path / "changed"
    tree = cache / "toolchains" / "trees" / downloaded.parent.name
    shutil.copytree(downloaded.parent, tree)
    header = next(tree.rglob("macros.h"))
    os.utime(header)
    assert Toolchains(cache=cache).torch(Release(2, 10), "stable").root == tree / "tree"
    header.chmod(0o644)
    header.write_bytes(header.read_bytes()[:-1] + b" ")
    expected = {"where": header, "message": "has SHA-256", "hint": "toolchain clean"}
    kernel_builder.refuse(project, *FOR_CPU, cache=cache, error=StoreError, **expected)


def test_a_cache_path_that_nvcc_would_split_is_refused(project: Path, kernel_builder: Run, new_cache: NewCache) -> None:
    for name in ("my cache", "one,two", "$HOME"):
        cache = new_cache(name)
        expected = {"where": cache, "message": "white space, commas", "hint": "KERNEL_BUILDER_CACHE"}
        kernel_builder.refuse(project, *FOR_CPU, cache=cache, error=StoreError, **expected)


def test_debugging_and_a_required_sandbox_exclude_each_other(project: Path, kernel_builder: Run) -> None:
    expected = {"where": "--sandbox", "message": "runs nothing in a sandbox", "hint": "leave out"}
    options = (*FOR_CPU, "--sandbox", "require")
    kernel_builder.refuse(project, *options, error=ToolchainError, **expected, KERNEL_BUILDER_DEBUG="keep")
