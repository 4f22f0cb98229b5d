"""Packages that have not run on their hardware are labelled, and published on request only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernel_builder.backends.rocm import NOT_RUN
from kernel_builder.hub import card
from kernel_builder.hub.packages import HubPackage, without_untested
from kernel_format.errors import CheckError

CPU, ROCM = "torch-stable-abi210-cpu-x86_64-linux", "torch-stable-abi210-rocm71-x86_64-linux"


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, HubPackage]:
    for name, backend, provenance in ((CPU, "cpu", {}), (ROCM, "rocm", {"status": NOT_RUN})):
        metadata = {
            "id": "_scale_1",
            "name": "scale",
            "version": 1,
            "license": "mit",
            "python-depends": [],
            "backend": {"type": backend, "archs": ["gfx942"] if backend == "rocm" else []},
            "provenance": {"kernel-builder": {"version": "1.0"}, **provenance},
            "digest": {"algorithm": "sha256", "files": {}},
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text(json.dumps(metadata))
    return {name: HubPackage(tmp_path / name) for name in (CPU, ROCM)}


def test_untested_packages_are_excluded_and_the_card_names_them(packages: dict[str, HubPackage]) -> None:
    assert [*without_untested(packages, "")] == [CPU]
    with pytest.raises(CheckError, match=f"no package remains: {NOT_RUN}"):
        without_untested({ROCM: packages[ROCM]}, "")
    table = card._variants(packages)
    assert table.endswith(f"\n\nCompiled and checked, not run on AMD hardware: `{ROCM}`.")
    assert "| 2.10 and later | 7.1 |" in table
    assert "not run" not in card._variants({CPU: packages[CPU]})
