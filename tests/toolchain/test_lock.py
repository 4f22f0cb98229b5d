"""The toolchain lock: written from an index, read back, and the lock that comes with the builder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from kernel_builder.config import matrix
from kernel_builder.config.variant import PLATFORMS, Release
from kernel_builder.errors import FetchError, ToolchainError
from kernel_builder.progress import Silent
from kernel_builder.toolchain import lock, wheel_trees
from kernel_builder.toolchain.index import Index
from kernel_builder.toolchain.resolve import resolve

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
    again = resolve(Index(server.url), [Release(2, 10)], [Release(12, 6), Release(13, 0)], PLATFORMS, Silent())
    assert lock.dumps(again) == lock.dumps(pinned), "12.6 is left out: the index has no compiler of it"
    wheels = [wheel for cuda in pinned.cuda.values() for parts in cuda.platforms.values() for wheel in parts]
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
        resolve(Index(server.url), [], [Release(13, 0)], PLATFORMS, Silent())
    assert "cuda_toolkit-13.0.2" in str(caught.value) and "--index-url" in (caught.value.hint or "")


def test_a_torch_release_that_the_index_lacks(server: IndexServer) -> None:
    with pytest.raises(FetchError, match=r"torch 2\.99"):
        resolve(Index(server.url), [Release(2, 99)], [], PLATFORMS, Silent())


def test_a_written_lock_reads_back(pinned: lock.Lock, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text(lock.dumps(pinned))
    assert lock.read(path) == pinned


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}', '{"schema": 2, "cuda": {"13.0": {}}, "torch": {}}'])
def test_a_file_that_is_not_a_lock_is_rejected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ToolchainError, match=r"other\.json: is not a toolchain lock"):
        lock.read(path)


def test_the_shipped_lock_covers_the_matrix_within_its_budget() -> None:
    shipped = lock.shipped()
    assert tuple(shipped.torch) == matrix.torch_releases()
    assert set(shipped.cuda) == {release for release in matrix.cuda_releases() if release.major >= 13}
    for platform in PLATFORMS:
        assert all(platform in entry.platforms for entry in [*shipped.cuda.values(), *shipped.torch.values()])
    compiler = wheel_trees.cuda_tree(shipped.cuda[Release(13, 0)], "x86_64-linux")
    headers = wheel_trees.torch_tree(shipped.torch[Release(2, 10)], "x86_64-linux", "stable")
    assert compiler.download + headers.download < 80_000_000


def test_the_lock_names_no_host(pinned: lock.Lock) -> None:
    for text in (lock.dumps(pinned), lock.dumps(lock.shipped())):
        assert "//" not in text
        assert json.loads(text)["schema"] == lock.SCHEMA
