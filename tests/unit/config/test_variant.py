"""Variant names: written, parsed, and compared with the public client's parser."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder import toml_file
from kernel_builder.backends.cpu import CPU
from kernel_builder.backends.cuda import CUDA
from kernel_builder.config import known_backends
from kernel_builder.config.variant import FullAbi, Noarch, Release, StableAbi, TvmFfiAbi, Variant
from kernel_format import variant as format_variant
from kernel_format.errors import VariantError
from kernel_format.release import Version, is_within

X86, ARM = "x86_64-linux", "aarch64-linux"
NAMES = {
    "torch214-cxx11-cu130-x86_64-linux": Variant(FullAbi(Release(2, 14)), CUDA, Release(13, 0), X86),
    "torch29-cxx11-cpu-aarch64-linux": Variant(FullAbi(Release(2, 9)), CPU, None, ARM),
    "torch-stable-abi210-cu126-x86_64-linux": Variant(StableAbi(Release(2, 10)), CUDA, Release(12, 6), X86),
    "torch-xpu": Variant(Noarch(), known_backends.get("xpu")),
    "tvm-ffi01-cpu-aarch64-linux": Variant(TvmFfiAbi(Release(0, 1)), CPU, None, ARM),
    "tvm-ffi01-cu130-x86_64-linux": Variant(TvmFfiAbi(Release(0, 1)), CUDA, Release(13, 0), X86),
}
OTHERS = (
    *("", "torch", "torch-", "torch-vulkan", "torch214-cu130-x86_64-linux", "torch214-cxx98-cu130-x86_64-linux"),
    *("torch214-cxx11-xpu20260-x86_64-linux", "torch214-cxx11-cu130-riscv-linux"),
    *("torch214-cxx11-cu130-x86_64-linux/..", "torch-stable-abi210-cxx11-cpu-x86_64-linux"),
)


def test_names_are_parsed_and_written() -> None:
    assert {name: Variant.parse(name) for name in NAMES} == NAMES
    assert [variant.name for variant in NAMES.values()] == list(NAMES)


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(VariantError, match=r"torch214-cxx11-cu130-x86_64-linux|compiles no"):
        Variant.parse(name)


@pytest.mark.parametrize(
    ("name", "backend", "release", "platform"), toml_file.read(Path(__file__).with_name("variant_names.toml"))["known"]
)
def test_names_of_any_builder_are_read_and_written(name: str, backend: str, release: str, platform: str) -> None:
    read = format_variant.parse(name)
    assert [read.backend.title, str(read.release), str(read.platform)] == [backend, release, platform]
    assert read.name == name


def test_a_release_is_older_than_its_patches() -> None:
    assert Release.parse("2.9") < Release.parse("2.10")
    patch, major = Version.parse("12.8.1"), Version.parse("13")
    releases = [Release(12, 8), Release(12, 9), Release(13, 0), Release(13, 1)]
    assert [is_within(release, patch, None) for release in releases] == [False, True, True, True]
    assert [is_within(release, None, patch) for release in releases] == [True, False, False, False]
    assert [is_within(release, None, major) for release in releases] == [True, True, True, False]
