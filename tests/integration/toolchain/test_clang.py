"""clang from the index: which parts of which wheels, and which CUDA releases it compiles for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli

from kernel_builder.backends import CLANG
from kernel_builder.backends.cuda import toolkits
from kernel_builder.config.variant import PLATFORMS, Release, this_platform
from kernel_builder.progress import Silent
from kernel_builder.toolchain import Toolchains, lock
from kernel_builder.toolchain.components import in_table
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.resolve import resolve
from kernel_format.errors import ToolchainError

from .index_server import IndexServer, noise, wheel

HERE = this_platform()
MACHINE = HERE.partition("-")[0]
ZIGLANG = f"ziglang-0.17.1-py3-none-manylinux_2_12_{MACHINE}.whl"
INCLUDE = "clang_include_cleaner/data/lib/clang/22/include"
_REQUIRED = {
    "nvidia-cuda-cccl": {"include/nv/target": b"// target\n"},
    "nvidia-cuda-nvcc": {
        "bin/ptxas": b"\x7fELF ptxas",
        "nvvm/lib64/libnvvm.so": noise("libnvvm", 2_000_000),
        "nvvm/libdevice/libdevice.10.bc": b"BC",
    },
    "nvidia-cuda-runtime": {"include/cuda.h": b"// 12.8\n", "lib/libcudart.so.12": noise("cudart", 700_000)},
    "nvidia-curand": {"include/curand_mtgp32_kernel.h": b"// curand\n", "include/curand_kernel.h": b"// no\n"},
}


def _wheels(machine: str) -> dict[str, bytes]:
    def name(project: str, version: str) -> str:
        return f"{project.replace('-', '_')}-{version}-py3-none-manylinux_2_12_{machine}.whl"

    files = {
        name("ziglang", "0.17.1"): wheel(
            "ziglang",
            "0.17.1",
            {"ziglang/lib/std/std.zig": noise("std", 1_000_000), "ziglang/zig": b"\x7fELF" + noise("zig", 2_000_000)},
        ),
        name("ziglang", "0.18.0"): wheel("ziglang", "0.18.0", {"ziglang/zig": b"\x7fELF of another clang"}),
        name("clang-include-cleaner", "22.1.7"): wheel(
            "clang-include-cleaner",
            "22.1.7",
            {f"{INCLUDE}/__clang_cuda_runtime_wrapper.h": b"// wrapper\n", "bin/tool": noise("tool", 900_000)},
        ),
        name("nvidia-cuda-nvcc", "13.0.88"): wheel(
            "nvidia-cuda-nvcc",
            "13.0.88",
            {"nvidia/cu13/bin/fatbinary": b"\x7fELF fatbinary", "nvidia/cu13/bin/nvcc": noise("nvcc", 900_000)},
        ),
    }
    for project, content in _REQUIRED.items():
        directory = f"nvidia/{project.removeprefix('nvidia-').replace('-', '_')}"
        inside = {f"{directory}/{path}": data for path, data in content.items()}
        files[name(f"{project}-cu12", "12.8.90")] = wheel(f"{project}-cu12", "12.8.90", inside)
    return files


def _set(version: str, requirements: list[str]) -> bytes:
    lines = [f"Version: {version}", *(f"Requires-Dist: {requirement}; extra == 'all'" for requirement in requirements)]
    return wheel("cuda-toolkit", version, {}, "\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    sets = {
        "cuda_toolkit-12.8.1-py3-none-any.whl": _set("12.8.1", [f"{project}-cu12==12.8.90.*" for project in _REQUIRED]),
        "cuda_toolkit-13.0.2-py3-none-any.whl": _set("13.0.2", ["nvidia-cuda-nvcc==13.0.88.*"]),
    }
    return {**sets, **{name: data for platform in PLATFORMS for name, data in _wheels(platform.split("-")[0]).items()}}


_TABLE = """
[component.clang-22]
title = "clang 22"
files = [
    { project = "ziglang", release = "0.17", prefix = "ziglang/", take = ["zig"] },
    { project = "clang-include-cleaner", release = "22.1", prefix = "clang_include_cleaner/data/lib/clang/22/", take = ["include/"] },
]

[component."cuda-12.8"]
title = "CUDA 12.8"
required-by = "cuda-toolkit 12.8"
files = [
    { project = "nvidia-cuda-cccl-cu12", prefix = "nvidia/cuda_cccl/", take = ["include/"] },
    { project = "nvidia-cuda-nvcc-cu12", prefix = "nvidia/cuda_nvcc/", take = ["bin/", "include/", "nvvm/libdevice/"] },
    { project = "nvidia-cuda-runtime-cu12", prefix = "nvidia/cuda_runtime/", take = ["include/"] },
    { project = "nvidia-curand-cu12", prefix = "nvidia/curand/", take = ["include/curand_mtgp32_kernel.h"] },
    { project = "nvidia-cuda-nvcc", required-by = "cuda-toolkit 13.0", prefix = "nvidia/cu13/", take = ["bin/fatbinary"] },
]
"""  # noqa: E501


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[IndexServer]:
    with IndexServer(dict(files)) as running:
        yield running


@pytest.fixture
def pinned(server: IndexServer) -> lock.Lock:
    resolved = resolve(Index(server.url), in_table(tomli.loads(_TABLE)), Silent())
    server.requests.clear()
    return resolved


def test_the_needed_parts_are_fetched_and_unpacked(server: IndexServer, pinned: lock.Lock, cache: Path) -> None:
    """For CUDA 12.6 too: clang has one release for all of its major."""
    tools = Toolchains(cache=cache, pinned=pinned, index_url=server.url)
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


def test_the_choice_of_a_compiler(pinned: lock.Lock, cache: Path) -> None:
    def obstacle(release: Release, **settings: str) -> str | None:
        tools = Toolchains(cache=cache, pinned=pinned, offline=True, **settings)  # type: ignore[arg-type]
        problem = toolkits.obstacle(tools, release)
        assert problem is None or problem.hint
        return problem and f"{problem.reason}; {problem.hint}"

    assert obstacle(Release(12, 8)) is None
    assert "needs CUDA 13.0; this builder has 12.8" in (obstacle(Release(13, 0)) or "")
    assert "leave out `--cuda-compiler nvcc`" in (obstacle(Release(12, 6), cuda_compiler="nvcc") or "")
    assert obstacle(Release(13, 0), cuda_compiler="clang") is None
    assert "clang compiles for CUDA 12 and later" in (obstacle(Release(11, 8), cuda_compiler="clang") or "")


def test_a_lock_without_clang(pinned: lock.Lock, cache: Path) -> None:
    without = {name: pin for name, pin in pinned.items() if name != CLANG}
    tools = Toolchains(cache=cache, pinned=without, offline=True)
    assert toolkits.obstacle(tools, Release(12, 6)) is not None
    with pytest.raises(ToolchainError, match="clang-22: the lock does not have it"):
        tools.component(CLANG)
