"""nvcc's flags, as clang spells them."""

from __future__ import annotations

import pytest

from kernel_builder.backends.cuda.clang_flags import of_clang
from kernel_format.errors import ConfigError


def test_flags_of_public_projects() -> None:
    host = ("-O3", "-std=c++20", '-DA="b c"', "-UNDEBUG", "-Wno-deprecated-declarations", "-g", "-D", "A=1")
    assert of_clang(host, "") == host
    assert of_clang(("--expt-relaxed-constexpr", "--threads=4", "-t", "4", "-diag-suppress=174"), "") == ()
    assert of_clang(("-lineinfo", "--maxrregcount=64", "--fmad=false", "--prec-div=true"), "") == (
        "-gline-tables-only",
        "-Xcuda-ptxas",
        "--maxrregcount=64",
        "-ffp-contract=off",
    )
    assert "-fgpu-approx-transcendentals" in of_clang(("--use_fast_math",), "")


def test_flags_for_the_programs_that_nvcc_runs() -> None:
    given = ("-Xptxas=-v,-O3", "-Xptxas", "-dlcm=ca", "-Xcompiler=-fno-strict-aliasing", "-Xcudafe=--diag_warning=1")
    assert of_clang(given, "") == (
        "-Xcuda-ptxas",
        "-v",
        "-Xcuda-ptxas",
        "-O3",
        "-Xcuda-ptxas",
        "-dlcm=ca",
        "-Xarch_host",
        "-fno-strict-aliasing",
    )


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("-gencode", "arch=compute_90a,code=sm_90a"), "cuda-capabilities"),
        (("--device-debug",), "--cuda-home"),
        (("-arch=sm_90",), "cuda-capabilities"),
    ],
)
def test_a_flag_that_clang_has_nothing_like(flags: tuple[str, ...], hint: str) -> None:
    with pytest.raises(ConfigError, match="clang, which compiles the variants of CUDA 12, has nothing like") as caught:
        of_clang(flags, "build.toml: [kernel.a] cuda-flags")
    assert caught.value.where == "build.toml: [kernel.a] cuda-flags"
    assert hint in (caught.value.hint or "")
