"""Which compiler flags a project may have, and nvcc's flags as clang spells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_builder import toml_file
from kernel_builder.backends.cuda import CUDA
from kernel_builder.backends.cuda.commands import of_clang
from kernel_builder.config import compiler_flags
from kernel_builder.config.project import Kernel
from kernel_format.errors import ConfigError

pytestmark = pytest.mark.attack

REFUSED = toml_file.read(Path(__file__).with_name("refused_flags.toml"))


def check(*, cxx: tuple[str, ...] = (), cuda: tuple[str, ...] = ()) -> None:
    kernel = Kernel("scale", CUDA, depends=("torch",), src=("a.cu",), include=(), cxx_flags=cxx, cuda_flags=cuda)
    compiler_flags.check(Path("project"), "kernel.scale", "cxx-flags", kernel.cxx_flags)
    CUDA.check_flags(Path("project"), "kernel.scale", kernel)


def test_flags_of_public_projects_are_allowed() -> None:
    host = "-O3 -std=c++20 -UNDEBUG -Wno-deprecated-declarations -fopenmp -mavx512f -march=x86-64-v3 -lgomp -g -D A=1"
    nvcc = (
        "--use_fast_math --expt-relaxed-constexpr -lineinfo --threads=4 -t 4 -res-usage -Xptxas=-v,-O3 -Xptxas "
        "-dlcm=ca -Xfatbin=-compress-all -Xcompiler=-fPIC,-O2 -diag-suppress=174 --diag-suppress 177 --maxrregcount=64 "
        "-gencode arch=compute_90a,code=sm_90a -static-global-template-stub=false --ftz true -src-in-ptx -Wreorder "
        "-split-compile=0"
    )
    check(cxx=(*host.split(), '-DA="b c"', "-fbracket-depth=1024"))
    check(cuda=(*host.split(), '-DA="b c"', *nvcc.split()))


def test_include_options_for_the_project_are_told_apart() -> None:
    flags = ("-O2", "-I./inc/", "-I", "a/b", "-I../up", "-I/opt/x", "--include-path=c", "-I.")
    assert compiler_flags.split_includes(flags) == (("-O2", "-I../up", "-I/opt/x"), ("inc", "a/b", "c", "."))


@pytest.mark.parametrize(("flag", "reason"), REFUSED["host"].items())
def test_flags_that_run_programs_or_read_files_are_refused(flag: str, reason: str) -> None:
    for flags in (
        {"cxx": (flag,)},
        {"cuda": (flag,)},
        {"cuda": (f"-Xcompiler={flag}",)},
        {"cuda": ("-Xcompiler", flag)},
    ):
        with pytest.raises(ConfigError) as caught:
            check(**flags)
        assert caught.value.where.startswith("project/build.toml: [kernel.scale] c")
        if "," not in flag or "Xcompiler" not in str(flags):  # nvcc splits there
            assert reason in caught.value.message


@pytest.mark.parametrize(("flags", "reason"), REFUSED["nvcc"].items())
def test_flags_of_nvcc_are_refused_with_a_reason(flags: str, reason: str) -> None:
    for keys in ("cuda", "cxx") if flags.startswith(("-D", "-U")) else ("cuda",):
        with pytest.raises(ConfigError, match=reason):
            check(**{keys: tuple(flags.split())})


TO_A_SHELL = r"^project/build.toml: \[kernel.scale\] cuda-flags: .*nvcc passes it to a shell"
SHELL = ("$(touch ran)", "`touch ran`", "$HOME", "\\\\")


@pytest.mark.parametrize("value", [*SHELL, "a;touch ran", "a b", "*", "<a", '"a"'])
def test_flags_of_nvcc_mean_nothing_to_its_shell(value: str) -> None:
    for flags in (("-Xcompiler=-DA=" + value,), ("-Xcompiler", "-DA=" + value), ("--compiler-options", "-DA=" + value)):
        with pytest.raises(ConfigError, match=TO_A_SHELL):
            check(cuda=flags)
    for flags in ((f"-DA={value}",), ("-D", f"A={value}")):
        if value in SHELL:
            with pytest.raises(ConfigError, match=TO_A_SHELL):
                check(cuda=flags)
        else:
            check(cuda=flags)
        check(cxx=flags)  # g++ runs no shell


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("-gencode", "arch=compute_90a,code=sm_90a"), "cuda-capabilities"),
        (("--device-debug",), "--cuda-home"),
        (("-arch=sm_90",), "cuda-capabilities"),
    ],
)
def test_a_flag_that_clang_has_nothing_like(flags: tuple[str, ...], hint: str) -> None:
    with pytest.raises(ConfigError, match=r"^place: .*clang, .* of CUDA 12, has nothing like") as caught:
        of_clang(flags, "place")
    assert hint in (caught.value.hint or "")
