"""The toolchain lock: written from an index, read back, and the lock that comes with the builder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_builder.backends.cuda import releases as cuda_releases
from kernel_builder.config import build_toml, matrix
from kernel_builder.config.variant import PLATFORMS, Release
from kernel_builder.progress import Silent
from kernel_builder.toolchain import dependencies, lock, trees
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.resolve import ToPin, resolve
from kernel_format.errors import FetchError, ToolchainError

from .conftest import LIBRARIES
from .index_server import Fault, IndexServer


def test_the_newest_matching_versions_are_pinned(pinned: lock.Lock) -> None:
    cuda = pinned.cuda[Release(13, 0)]
    assert cuda.version == "13.0.2", "neither the older version nor the pre-release"
    assert {wheel.project: wheel.version for wheel in cuda.platforms["aarch64-linux"]} == {
        "nvidia-cuda-cccl": "13.0.85",
        "nvidia-cuda-crt": "13.0.88",
        "nvidia-cuda-nvcc": "13.0.88",  # 13.0.99 is newer, but cuda-toolkit does not require it
        "nvidia-cuda-runtime": "13.0.96",
        "nvidia-nvvm": "13.0.88",
    }
    torch = pinned.torch[Release(2, 10)]
    assert torch.version == "2.10.1"
    assert {platform: subsets["full"].file for platform, subsets in torch.platforms.items()} == {
        platform: f"torch-2.10.1-3-cp310-cp310-manylinux_2_28_{platform.partition('-')[0]}.whl"
        for platform in PLATFORMS
    }


def test_writing_downloads_little_more_than_the_pinned_ranges_and_is_repeatable(
    server: IndexServer, pinned: lock.Lock
) -> None:
    cudas = [Release(12, 6), Release(13, 0)]
    again = resolve(Index(server.url), ToPin(torch=[Release(2, 10)], cuda=cudas, libraries=LIBRARIES), Silent())
    assert lock.dumps(again) == lock.dumps(pinned), "12.6 is left out: the index has no compiler of it"
    cuda_parts = [(*cuda.platforms.values(), *cuda.libraries.values()) for cuda in pinned.cuda.values()]
    wheels = [wheel for both in cuda_parts for parts in both for wheel in parts]
    # The files of header libraries are downloaded twice: once to pin them, once to read the version that they state.
    wheels += [pin for dependency in pinned.dependencies.values() for pin in dependency.files] * 2
    wheels += [
        wheel for torch in pinned.torch.values() for parts in torch.platforms.values() for wheel in parts.values()
    ]
    # The pinned ranges are downloaded to hash them, and the zip directory at the end of each wheel.
    assert server.sent < sum(wheel.download for wheel in wheels) * 1.1


def test_the_hash_of_the_fetched_ranges(pinned: lock.Lock, wheel_files: dict[str, bytes]) -> None:
    for parts in pinned.cuda[Release(13, 0)].platforms.values():
        for wheel in parts:
            fetched = b"".join(wheel_files[wheel.file][start:stop] for start, stop in wheel.ranges)
            assert wheel.fetched == hashlib.sha256(fetched).hexdigest()


def test_an_index_that_sends_whole_files_cannot_be_locked(server: IndexServer) -> None:
    server.faults["cuda_toolkit-13.0.2-py2.py3-none-any.whl"] = Fault(no_ranges=True)
    with pytest.raises(FetchError, match="does not answer range requests") as caught:
        resolve(Index(server.url), ToPin(cuda=[Release(13, 0)]), Silent())
    assert "cuda_toolkit-13.0.2" in str(caught.value) and "PIP_INDEX_URL" in (caught.value.hint or "")


def test_a_torch_release_that_the_index_lacks(server: IndexServer) -> None:
    with pytest.raises(FetchError, match=r"torch 2\.99"):
        resolve(Index(server.url), ToPin(torch=[Release(2, 99)]), Silent())


def test_a_written_lock_reads_back(pinned: lock.Lock, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text(lock.dumps(pinned))
    assert lock.read(path) == pinned


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 3, "cuda": {"13.0": {}}, "torch": {}}'])
def test_a_file_that_is_not_a_lock_is_rejected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ToolchainError, match=r"other\.json: is not a toolchain lock"):
        lock.read(path)


def test_the_shipped_lock_covers_the_matrix_within_its_budget() -> None:
    shipped = lock.shipped()
    assert tuple(shipped.torch) == matrix.torch_releases()
    assert set(shipped.cuda) == {release for release in cuda_releases() if release.major >= 13}
    for platform in PLATFORMS:
        assert all(platform in entry.platforms for entry in [*shipped.cuda.values(), *shipped.torch.values()])
    compiler = trees.cuda_tree(shipped.cuda[Release(13, 0)], "x86_64-linux")
    headers = trees.torch_tree(shipped.torch[Release(2, 10)], "x86_64-linux", "stable")
    assert compiler.download + headers.download < 80_000_000
    for cuda in shipped.cuda.values():
        assert all(trees.libraries_tree(cuda, platform).download < 1_100_000 for platform in PLATFORMS)


def test_the_shipped_lock_has_every_header_library_that_an_index_has() -> None:
    shipped, known = lock.shipped(), dependencies.known()
    assert {"torch", "sycl_tla", "metal-cpp", *known} == set(build_toml.KERNEL_DEPENDS)
    assert set(shipped.dependencies) == {name for name, library in known.items() if library.files}
    for name, pin in shipped.dependencies.items():
        assert (pin.version, pin.license) == (known[name].version, known[name].license)
        assert name == f"cutlass_{'_'.join(pin.version.split('.')[:2])}"
        assert [(pinned_file.file, pinned_file.prefix, pinned_file.take) for pinned_file in pin.files] == [
            (pinned_file.file, pinned_file.prefix, pinned_file.take) for pinned_file in known[name].files
        ]
        assert trees.dependency_tree(pin).download < 6_000_000


def test_cuda_libraries_are_pinned_without_the_libraries(pinned: lock.Lock) -> None:
    libraries = {pin.project: pin for pin in pinned.cuda[Release(13, 0)].libraries["x86_64-linux"]}
    assert libraries.keys() == {"nvidia-cublas", "nvidia-cusparse", "nvidia-cudnn-cu13"}
    assert libraries["nvidia-cublas"].download < 2_000
    assert libraries["nvidia-cublas"].take == ("include/",)
    assert libraries["nvidia-cudnn-cu13"].version == "9.19.0.56", "neither the newest nor the oldest: Torch requires it"


def test_header_libraries_are_pinned_from_wheels_and_source_distributions(
    pinned: lock.Lock, wheel_files: dict[str, bytes]
) -> None:
    assert list(pinned.dependencies) == ["cutlass_3_8", "cutlass_4_0"], "2.10 is in no index"
    (wheel,) = pinned.dependencies["cutlass_3_8"].files
    assert wheel.record and wheel.download < 3_000
    for sdist in pinned.dependencies["cutlass_4_0"].files:
        assert sdist.record is None
        assert sdist.ranges == ((0, len(wheel_files[sdist.file])),)
        assert sdist.sha256 == sdist.fetched == hashlib.sha256(wheel_files[sdist.file]).hexdigest()


def test_a_header_library_that_states_another_version_is_not_pinned(server: IndexServer) -> None:
    wrong = replace(LIBRARIES[1], version="3.8.1")
    with pytest.raises(ToolchainError, match=r"states version 3\.8\.0, expected 3\.8\.1"):
        resolve(Index(server.url), ToPin(libraries=[wrong]), Silent())


def test_the_lock_names_no_host(pinned: lock.Lock) -> None:
    for text in (lock.dumps(pinned), lock.dumps(lock.shipped())):
        assert "//" not in text
        assert json.loads(text)["schema"] == lock.SCHEMA
