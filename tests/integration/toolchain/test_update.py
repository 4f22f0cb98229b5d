"""New releases on an index, and the edits that they lead to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_builder import scaffold
from kernel_builder.progress import Progress
from kernel_builder.toolchain import lock
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.resolve import resolve
from kernel_builder.upkeep import CUDA, FILES, LOCK, MATRIX, SHIMS, find
from kernel_format.errors import FetchError
from tests.support.files import write_files
from tests.support.places import SOURCES

from .conftest import COMPONENTS, HEADER_LIBRARIES, TABLES
from .index_server import IndexServer, wheel


@pytest.fixture(scope="module")
def torch_files() -> dict[str, bytes]:
    """Wheels of Torch 2.10 and 2.16 with headers."""
    include = "torch/include"
    files = {}
    for version in ("2.10.3", "2.16.0"):
        content = {
            f"{include}/ATen/Config.h": b"// config\n",
            f"{include}/torch/csrc/api/include/torch/all.h": b"#if __cplusplus < 202002L\n#error\n#endif\n",
            f"{include}/torch/csrc/inductor/aoti_torch/c/shim.h": SOURCES["torch_shim"].encode(),
            f"{include}/torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h": b"",
            f"{include}/torch/csrc/stable/c/shim.h": b"",
            f"{include}/torch/headeronly/version.h": f"// {version}\n".encode(),
        }
        for machine in ("x86_64", "aarch64"):
            name = f"torch-{version}-cp311-cp311-manylinux_2_28_{machine}.whl"
            files[name] = wheel("torch", version, content, f"Version: {version}\n")
    return files


@pytest.fixture
def index(wheel_files: dict[str, bytes], torch_files: dict[str, bytes]) -> Iterator[IndexServer]:
    """An index with Torch 2.10, and the files that `release` adds."""
    with IndexServer(wheel_files | {name: data for name, data in torch_files.items() if "-2.10" in name}) as server:
        yield server


@pytest.fixture
def checkout(tmp_path: Path, index: IndexServer) -> Path:
    """The tables of a builder that knows all releases of the index."""
    root = tmp_path / "checkout"
    write_files(root, {name: (TABLES / Path(name).name).read_text() for name in (MATRIX, CUDA, SHIMS)})
    return write_files(root, {LOCK: lock.dumps(resolve(Index(index.url), COMPONENTS, Progress()))})


def find_update(checkout: Path, index: IndexServer) -> tuple[list[str], dict[str, str]]:
    """Of the index with Torch's builds for every CUDA release, only the names are read."""
    versions = ("2.10.3+cu126", *(f"2.16.0+{build}" for build in ("cpu", "cu130", "cu134", "cu129", "xpu")))
    tags = [f"cp311-cp311-manylinux_2_28_{machine}" for machine in ("x86_64", "aarch64")]
    names = [f"torch-{version}-{tag}.whl" for version in versions for tag in tags]
    with IndexServer(dict.fromkeys(names, b"")) as builds:
        urls = {"index_url": index.url, "torch_index": builds.url}
        return find(checkout, HEADER_LIBRARIES, **urls, progress=Progress(), cache=checkout.parent / "cache")


def test_a_new_torch_release(checkout: Path, index: IndexServer, torch_files: dict[str, bytes]) -> None:
    before = {name: (checkout / name).read_text() for name in FILES}
    index.files |= torch_files
    changes, files = find_update(checkout, index)
    assert before == {name: (checkout / name).read_text() for name in FILES}, "nothing is written yet"
    scaffold.write(files, checkout, overwrite=True)
    assert set(files) == set(FILES)
    matrix = before[MATRIX].replace("\n# And", '\n[torch."2.16"]\ncxx = 20\n\n# And')
    assert (checkout / MATRIX).read_text() == matrix
    new = '\n"2.16" = [\n    "torch_cuda_second",\n    "torch_second",\n]\n'
    shims = before[SHIMS].replace("\n[library]", f"{new}\n[library]").removesuffix("]\n")
    shims += '    "torch_cuda_second",\n]\n'
    assert (checkout / SHIMS).read_text() == shims
    of_cuda = 'releases = ["12.6", "13.0"]\n'
    assert (checkout / CUDA).read_text() == before[CUDA].replace(
        of_cuda, f'{of_cuda}\n[torch."2.16"]\nreleases = ["13.0"]\n'
    )
    pinned = lock.loads((checkout / LOCK).read_text(), LOCK)
    assert [str(torch) for torch in lock.torch_releases(pinned)] == ["2.10", "2.16"]
    for line in (
        f"CUDA 13.4 is not in `{CUDA}`: add its components, capabilities and Torch releases there",
        f"`{CUDA}` changes",
    ):
        assert line in changes
    assert any(line.startswith("Torch 2.16 for CUDA 12.9, 13.0, 13.4, with C++20") for line in changes)
    assert find_update(checkout, index) == ([], {})


def test_a_new_patch(checkout: Path, index: IndexServer) -> None:
    for machine in ("x86_64", "aarch64"):
        name = f"torch-2.10.3-cp311-cp311-manylinux_2_28_{machine}.whl"
        index.files[name.replace("2.10.3", "2.10.4")] = index.files[name].replace(b"2.10.3", b"2.10.4")
    _, files = find_update(checkout, index)
    assert "torch-2.10.4-" in files[LOCK]
    assert set(files) == {LOCK}


@pytest.mark.attack
@pytest.mark.parametrize("kept", [-30, b"RECORD"])
def test_a_damaged_wheel_is_named_and_the_next_run_succeeds(index: IndexServer, kept: int | bytes) -> None:
    name = "torch-2.10.3-cp311-cp311-manylinux_2_28_x86_64.whl"
    whole = index.files[name]
    if isinstance(kept, int):
        index.files[name] = whole[:kept]
    else:
        start = whole.index(kept) + len(kept)  # of the member's content
        index.files[name] = whole[:start] + b"\xff" * 4 + whole[start + 4 :]
    with pytest.raises(FetchError, match=f"^{name}: the archive is damaged"):
        resolve(Index(index.url), COMPONENTS, Progress())
    index.files[name] = whole
    assert resolve(Index(index.url), COMPONENTS, Progress())
