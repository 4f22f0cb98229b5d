"""A project on the full C++ ABI of Torch."""

from __future__ import annotations

import pytest

from tests.integration.build_command.conftest import Copy, NewCache, Run
from tests.support.newest import NEWEST, full_abi


@pytest.mark.slow
def test_one_more_torch_release_compiles_its_binding_only(
    copy_project: Copy, new_cache: NewCache, kernel_builder: Run
) -> None:
    """`test_public_projects.py` loads such a package for the CPU."""
    project, cache = copy_project("full-scale"), new_cache("cache")
    for variant, compiles in (("torch213-cxx11-cu130-x86_64-linux", 2), (full_abi(NEWEST, "cu130"), 1)):
        done = kernel_builder(cache, "build", project, "--variant", variant, "--no-load")
        assert (done.code, done.answer["compiles"]) == (0, compiles), done
        assert (project / "build" / variant / "metadata.json").is_file()
