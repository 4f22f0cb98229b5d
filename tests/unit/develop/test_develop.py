"""The Torch release that a test shell installs for a variant."""

from __future__ import annotations

import pytest

from kernel_builder.config.variant import Variant
from kernel_builder.develop.interpreter import torch_build
from kernel_format.errors import ToolchainError
from tests.support.newest import LAST_FOR_CUDA_12, NEWEST, cuda_backends


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch214-cxx11-cu132-x86_64-linux", "2.14 cu132"),
        ("torch213-cxx11-cpu-x86_64-linux", "2.13 cpu"),
        ("torch-stable-abi210-cpu-x86_64-linux", f"{NEWEST} cpu"),
        ("torch-stable-abi210-cu126-x86_64-linux", f"{LAST_FOR_CUDA_12} cu126"),
        ("torch-stable-abi210-cu127-x86_64-linux", "2.11 cu128"),  # no build for 12.7, and 12.8 loads it
        ("torch-stable-abi210-rocm72-x86_64-linux", "2.13 rocm7.2"),
        ("torch-cuda", f"{NEWEST} {cuda_backends(NEWEST)[0]}"),
    ],
)
def test_the_newest_torch_that_fits_is_installed(name: str, expected: str) -> None:
    release, build = torch_build(Variant.parse(name))
    assert f"{release} {build}" == expected


@pytest.mark.parametrize("name", ["torch-metal", "torch-stable-abi210-cu140-x86_64-linux"])
def test_a_variant_without_a_torch_is_refused(name: str) -> None:
    with pytest.raises(ToolchainError, match="the matrix has no Torch release for"):
        torch_build(Variant.parse(name))
