"""The stable ABI's data agrees with the headers of the installed Torch, for each release."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from kernel_builder.checks.torch_stable_abi import shims
from kernel_builder.config.variant import Release

from .sample import TORCH

INSTALLED = Release.parse(torch.__version__.partition("+")[0])
HEADERS = ("inductor/aoti_torch/c/shim.h", "inductor/aoti_torch/generated/c_shim_aten.h", "stable/c/shim.h")
# The headers of 2.10 and later declare these without a guard. The headers of 2.9 do not have them.
UNGUARDED = {
    "aoti_torch_cuda_caching_allocator_raw_alloc",
    "aoti_torch_cuda_caching_allocator_raw_delete",
    "aoti_torch_delete_c10_value_object",
    "aoti_torch_int64_to_ivalue",
    "aoti_torch_str_to_ivalue",
    "aoti_torch_strlist_to_ivalue",
    "aoti_torch_tensor_to_ivalue",
}


def exported(release: Release, *flags: str) -> set[str]:
    """Return the functions that Torch's headers declare for the stable ABI of `release`."""
    target = f"-DTORCH_TARGET_VERSION=(({release.major}ULL<<56)|({release.minor}ULL<<48))"
    text = subprocess.run(
        ["g++", "-E", "-P", "-std=c++20", f"-I{TORCH / 'include'}", target, *flags, "-x", "c++", "-"],
        input="".join(f"#include <torch/csrc/{header}>\n" for header in HEADERS),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = re.findall(r'__visibility__\("default"\)\)\)[^;(]*?\b(\w+)\s*\(', text)
    return {name for name in names if "_mps_" not in name}


@pytest.mark.parametrize("release", sorted({r for r in shims().since.values() if r <= INSTALLED}), ids=str)
def test_the_functions_of_each_release(release: Release) -> None:
    declared = exported(release, "-DUSE_CUDA")
    assert {name for name, since in shims().since.items() if since <= release} == (
        declared - UNGUARDED if release == Release(2, 9) else declared
    )


def test_the_functions_of_cuda() -> None:
    known = {name for name in shims().of_backend["cuda"] if shims().since[name] <= INSTALLED}
    assert known == exported(INSTALLED, "-DUSE_CUDA") - exported(INSTALLED)
