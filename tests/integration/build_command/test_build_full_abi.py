"""A project on the full C++ ABI of Torch."""

from __future__ import annotations

import pytest

from tests.integration.build_command.conftest import (
    LOAD,
    Copy,
    NewCache,
    Run,
    run_python,
)
from tests.support.newest import NEWEST, full_abi

# A string stream puts the message together. Parts of it are newer than the oldest libstdc++.so.6.
REFUSED = """
try:
    kernel.scaled(torch.ones(3, 2).t(), 2.0)
except RuntimeError as error:
    print(str(error).splitlines()[0].partition(", ")[2])
"""


@pytest.mark.slow
def test_full_abi_project(copy_project: Copy, new_cache: NewCache, kernel_builder: Run) -> None:
    """One more Torch release compiles its binding only, no device code. The package loads."""
    project, cache = copy_project("full-scale"), new_cache("cache")
    first = kernel_builder(
        cache,
        "build",
        project,
        "--variant",
        "torch213-cxx11-cpu-x86_64-linux",
        "--variant",
        "torch213-cxx11-cu130-x86_64-linux",
        "--no-load",
    )
    assert first.code == 0, first
    assert first.answer["compiles"] == 4
    assert run_python(LOAD + REFUSED, project).splitlines() == ["[0.0, 2.0, 4.0]", "got 2 dimensions: [2, 3]"]
    further = kernel_builder(cache, "build", project, "--variant", full_abi(NEWEST, "cu130"), "--no-load")
    assert further.code == 0, further
    assert further.answer["compiles"] == 1
    assert (project / "build" / "torch213-cxx11-cpu-x86_64-linux" / "metadata.json").is_file()
