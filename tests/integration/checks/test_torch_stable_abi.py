"""The stable ABI's data agrees with the headers of the installed Torch, for each release."""

from __future__ import annotations

import pytest
import torch

from kernel_builder.checks.symbols import shims
from kernel_builder.config.variant import Release
from kernel_builder.upkeep import exported
from tests.support.sample_package import TORCH

INSTALLED = Release.parse(torch.__version__.partition("+")[0])
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


@pytest.mark.parametrize("release", sorted({r for r in shims().since.values() if r <= INSTALLED}), ids=str)
def test_the_functions_of_each_release(release: Release) -> None:
    declared = exported(TORCH / "include", release, cuda=True)
    assert {name for name, since in shims().since.items() if since <= release} == (
        declared - UNGUARDED if release == Release(2, 9) else declared
    )


def test_the_functions_of_cuda() -> None:
    known = {name for name in shims().of_backend["cuda"] if shims().since[name] <= INSTALLED}
    include = TORCH / "include"
    assert known == exported(include, INSTALLED, cuda=True) - exported(include, INSTALLED, cuda=False)
