"""clang from the index: which parts of which wheels, and which CUDA releases it compiles for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_builder.backends import CLANG
from kernel_builder.backends.cuda import toolkits
from kernel_builder.backends.tools import CudaCompiler
from kernel_builder.config.variant import Release
from kernel_builder.progress import Silent
from kernel_builder.toolchain import Toolchains, components, lock
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.resolve import resolve
from kernel_format.errors import ToolchainError

from .index_server import IndexServer


@pytest.fixture
def with_clang(server: IndexServer, pinned: lock.Lock) -> lock.Lock:
    resolved = resolve(Index(server.url), [components.known()[name] for name in (CLANG, "cuda-12.8")], Silent())
    server.requests.clear()
    return {**pinned, **resolved}


def test_the_needed_parts_are_fetched_and_unpacked(server: IndexServer, with_clang: lock.Lock, cache: Path) -> None:
    """For CUDA 12.6 too: clang has one release for all of its major."""
    tools = Toolchains(cache=cache, pinned=with_clang, index_url=server.url)
    assert toolkits.obstacle(tools, Release(12, 6)) is None
    toolkit = toolkits.toolkit(tools, Release(12, 6))
    assert (str(toolkit.release), toolkit.nvcc, toolkit.origin) == ("12.8", None, "index")
    assert toolkit.clang and toolkit.clang.version == "22.1.7"

    def unpacked(root: Path) -> dict[str, bool]:
        paths = [path for path in root.rglob("*") if path.is_file()]
        return {path.relative_to(root).as_posix(): os.access(path, os.X_OK) for path in paths}

    assert unpacked(toolkit.clang.root) == {"zig": True, "include/__clang_cuda_runtime_wrapper.h": False}
    assert unpacked(toolkit.root) == {
        "bin/fatbinary": True,
        "bin/ptxas": True,
        "include/cuda.h": False,
        "include/curand_mtgp32_kernel.h": False,
        "include/nv/target": False,
        "nvvm/libdevice/libdevice.10.bc": False,
    }
    assert 2_000_000 < sum(request.sent for request in server.requests) < 2_010_000


@pytest.mark.parametrize(
    ("release", "compiler", "words"),
    [
        ("12.8", None, None),
        ("13.2", None, "needs CUDA 13.2; this builder has 12.8 and 13.0"),
        ("12.6", "nvcc", "leave out `--cuda-compiler nvcc`"),
        ("13.0", "clang", None),
        ("11.8", "clang", "leave out `--cuda-compiler clang`"),
    ],
)
def test_the_choice_of_a_compiler(
    with_clang: lock.Lock, cache: Path, release: str, compiler: CudaCompiler | None, words: str | None
) -> None:
    tools = Toolchains(cache=cache, pinned=with_clang, offline=True, cuda_compiler=compiler)
    obstacle = toolkits.obstacle(tools, Release.parse(release))
    assert obstacle is None if words is None else obstacle and words in f"{obstacle.reason}; {obstacle.hint}"


def test_a_lock_without_clang(toolchains: Callable[..., Toolchains]) -> None:
    tools = toolchains(offline=True)
    assert toolkits.obstacle(tools, Release(12, 6)) is not None
    with pytest.raises(ToolchainError, match="clang-22: the lock does not have it"):
        tools.component(CLANG)
