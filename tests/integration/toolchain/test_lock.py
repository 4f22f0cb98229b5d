"""The toolchain lock: written from an index, read back, and the lock that comes with the builder."""

from __future__ import annotations

import pytest

from kernel_builder.backends.cuda.releases import KNOWN_CAPABILITIES
from kernel_builder.config import build_toml, matrix
from kernel_builder.config.variant import PLATFORMS
from kernel_builder.toolchain import components, dependencies, lock
from kernel_format.errors import ToolchainError


def test_the_newest_matching_versions_are_pinned(pinned: lock.Lock) -> None:
    assert lock.loads(lock.dumps(pinned), "") == pinned
    cuda = pinned["cuda-13.0"]
    assert cuda["aarch64-linux"].version == "13.0.2", "neither the older version nor the pre-release"
    assert {wheel.project: wheel.version for wheel in cuda["aarch64-linux"].files} == {
        "nvidia-cuda-nvcc": "13.0.88",  # 13.0.99 is newer, but cuda-toolkit does not require it
        "nvidia-cuda-runtime": "13.0.96",
        "nvidia-nvvm": "13.0.88",
    }
    torch = pinned["torch-2.10-full"]
    assert {tree.version for tree in torch.values()} == {"2.10.1"}
    assert {platform: tree.files[0].file for platform, tree in torch.items()} == {
        platform: f"torch-2.10.1-3-cp310-cp310-manylinux_2_28_{platform.partition('-')[0]}.whl"
        for platform in PLATFORMS
    }
    libraries = {pin.project: pin for pin in pinned["cuda-libraries-13.0"]["x86_64-linux"].files}
    assert libraries["nvidia-cublas"].download < 2_000, "the headers, without the library"
    assert libraries["nvidia-cudnn-cu13"].version == "9.19.0.56", "neither the newest nor the oldest: Torch requires it"


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 6, "components": {"cuda-13.0": {}}}'])
def test_a_file_that_is_not_a_lock_is_rejected(text: str) -> None:
    with pytest.raises(ToolchainError, match=r"other\.json: is not a toolchain lock"):
        lock.loads(text, "other.json")


def test_the_shipped_lock_covers_the_matrix_within_its_budget() -> None:
    shipped, known = lock.shipped(), components.known()
    assert tuple(lock.torch_releases(shipped)) == matrix.load().torch
    assert shipped.keys() == {name for name, component in known.items() if component.files}
    for name, trees in shipped.items():
        wanted = [(file.project, file.prefix, file.take) for file in known[name].files]
        for platform, tree in trees.items():
            assert platform in (lock.ANY, *PLATFORMS) and tree.title == known[name].title
            assert [(file.project, file.prefix, file.take) for file in tree.files] == wanted
    downloads = {name: tree.download for name in shipped if (tree := lock.tree(shipped, name, "x86_64-linux"))}
    assert downloads.keys() == shipped.keys()
    assert downloads["cuda-13.0"] + downloads["torch-2.10-stable"] < 80_000_000
    assert downloads["clang-22"] < 65_000_000 and downloads["cuda-12.8"] < 16_000_000
    assert max(size for name, size in downloads.items() if name.startswith("cuda-libraries")) < 1_100_000
    assert max(size for name, size in downloads.items() if name.startswith("cutlass")) < 6_000_000
    assert {f"cuda-{release}" for release in KNOWN_CAPABILITIES if release.major >= 13} < shipped.keys()


def test_the_header_libraries_are_those_that_depends_names() -> None:
    known = dependencies.KNOWN
    assert {"torch", "sycl_tla", "metal-cpp", *known} == set(
        build_toml.SCHEMA["definitions"]["depends"]["items"]["enum"]
    )
    for name, library in known.items():
        assert name == f"cutlass_{'_'.join(library['version'].split('.')[:2])}"
