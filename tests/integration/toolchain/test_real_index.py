"""Fetches with the shipped lock from the index that this machine uses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kernel_builder.config.variant import Release
from kernel_builder.toolchain import Toolchains
from kernel_format.errors import FetchError

SOURCE = """
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
torch::stable::Tensor same(torch::stable::Tensor x) { return x; }
STABLE_TORCH_LIBRARY(probe, m) { m.def("same(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(probe, CPU, m) { m.impl("same", TORCH_BOX(&same)); }
"""


@pytest.mark.slow
def test_the_stable_headers_are_self_contained(tmp_path: Path) -> None:
    tools = Toolchains(cache=tmp_path / "cache")
    try:
        headers = tools.torch(Release(2, 10), "stable")
    except FetchError as error:
        if "cannot be reached" in error.message:
            pytest.skip(str(error))
        raise
    source = tmp_path / "probe.cpp"
    source.write_text(SOURCE)
    include = [f"-I{path}" for path in headers.include]
    subprocess.run([tools.host().path, "-std=c++17", "-fsyntax-only", *include, source], check=True)
