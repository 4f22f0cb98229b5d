"""Variant names: written, parsed, and compared with the public client's parser."""

from __future__ import annotations

import pytest
from kernels.variants import parse_variant

from kernel_builder.backends.cpu import CPU
from kernel_builder.backends.cuda import CUDA, releases
from kernel_builder.backends.recognized import XPU
from kernel_builder.config import matrix
from kernel_builder.config.variant import FullAbi, Noarch, Release, StableAbi, TvmFfiAbi, Variant
from kernel_format.errors import VariantError


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        (
            "torch214-cxx11-cu130-x86_64-linux",
            Variant(FullAbi(Release(2, 14)), CUDA, Release(13, 0), "x86_64-linux"),
        ),
        ("torch29-cxx11-cpu-aarch64-linux", Variant(FullAbi(Release(2, 9)), CPU, None, "aarch64-linux")),
        (
            "torch-stable-abi210-cu126-x86_64-linux",
            Variant(StableAbi(Release(2, 10)), CUDA, Release(12, 6), "x86_64-linux"),
        ),
        ("torch-xpu", Variant(Noarch(), XPU)),
        ("tvm-ffi01-cpu-aarch64-linux", Variant(TvmFfiAbi(Release(0, 1)), CPU, None, "aarch64-linux")),
        (
            "tvm-ffi01-cu130-x86_64-linux",
            Variant(TvmFfiAbi(Release(0, 1)), CUDA, Release(13, 0), "x86_64-linux"),
        ),
    ],
)
def test_names_are_parsed_and_written(name: str, variant: Variant) -> None:
    assert Variant.parse(name) == variant
    assert variant.name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "torch",
        "torch-",
        "torch-vulkan",
        "torch214-cu130-x86_64-linux",
        "torch214-cxx98-cu130-x86_64-linux",
        "torch214-cxx11-xpu20260-x86_64-linux",
        "torch214-cxx11-cu130-riscv-linux",
        "torch214-cxx11-cu130-x86_64-linux/..",
        "torch-stable-abi210-cxx11-cpu-x86_64-linux",
    ],
)
def test_other_names_are_refused_with_an_example(name: str) -> None:
    with pytest.raises(VariantError, match="torch214-cxx11-cu130-x86_64-linux"):
        Variant.parse(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch-stable-abi210-cpu-x86_64-windows", "cannot catch the exceptions"),
        ("torch212-metal-aarch64-darwin", "torch-metal"),
    ],
)
def test_names_of_other_systems_are_refused_with_the_reason(name: str, words: str) -> None:
    with pytest.raises(VariantError, match=words):
        Variant.parse(name)


def test_the_client_reads_every_name_of_the_matrix_the_same_way() -> None:
    for torch in matrix.torch_releases():
        for cuda in releases():
            for framework in (FullAbi(torch), StableAbi(torch)):
                name = Variant(framework, CUDA, cuda, "x86_64-linux").name
                theirs = parse_variant(name)
                assert theirs.variant_str == name
                assert (theirs.framework.version.major, theirs.framework.version.minor) == torch
                assert (theirs.arch.backend.version.major, theirs.arch.backend.version.minor) == cuda


def test_releases_are_ordered_as_numbers() -> None:
    assert Release.parse("2.9") < Release.parse("2.10")
    with pytest.raises(ValueError, match=r"2\.10"):
        Release.parse("2")
